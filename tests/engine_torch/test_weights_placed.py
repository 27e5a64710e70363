"""PyTorch's shard of every weight on every rank, compared with the core's boxes and placements; the other ranks do not exist.

Before ``fully_shard`` shards a parameter, each of its elements is set to its index, so that a shard shows where it is from.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from random import Random

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.boxes.placements import (
    Placement,
    Shard,
    StridedShard,
    as_fully_shard_names,
    placements_of,
)
from shardwright.core.findings.errors import FindingsError
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.fsdp_groups import WeightOfLayer, weights_of
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_torch.io.mesh import Ranks, ranks_of
from shardwright.engine_torch.lowering.parameters import empty_parameter, local_of
from shardwright.engine_torch.model import stage as engine_stage
from shardwright.engine_torch.model.model import Model
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build
from tests.matrix import some

MODELS = {
    "llama3-test": {"num_layers": "1"},
    "mixtral-test": {"num_layers": "1"},
    "deepseek3-test": {"num_layers": "2"},
}
MESHES = {
    "ddp": ("data=4",),
    "fsdp": ("fsdp=4",),
    "hsdp": ("data=2,fsdp=4",),
    "tp": ("data=2,tensor=2",),
    "fsdp-tp": ("fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2"),
    "cp": ("fsdp=2,context=2",),
    "ep": ("fsdp=2,expert=2", "data=2,fsdp=2,expert=2"),
    "ep-as-cp": ("fsdp=2,expert=2",),
    "ep-as-dp": ("fsdp=2,expert=2",),
    "cp-as-ep": ("fsdp=2,context=2,expert=2",),
    "tp-as-ep": ("fsdp=2,tensor=2", "data=2,fsdp=2,tensor=2"),
    "shard-exp-on-fsdp": ("fsdp=2,expert=2",),
    "fsdp-as-dp-for-attn": ("fsdp=2,expert=2",),
}
NOT_RUN = {"pp"}
CASES = [(model, layout, mesh) for model in MODELS for layout, meshes in MESHES.items() for mesh in meshes]


def test_every_preset_is_placed() -> None:
    assert {*MESHES, *NOT_RUN} == {*preset_names()}


def plan_of(model: str, layout: str, mesh: str, **changed: str) -> Plan:
    plan = make_plan(
        Request(
            layout=load_layout(layout),
            table=build(model, {**MODELS[model], **changed}),
            batch=8,
            length=32,
            mesh_sizes=mesh_sizes(mesh),
            engine="torch",
        )
    )
    assert not plan.errors, plan.errors
    return plan


@contextmanager
def as_rank(rank: int, num: int) -> Iterator[None]:
    """This process as one rank of several that do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num)
    try:
        yield
    finally:
        dist.destroy_process_group()


def numbers(one: WeightOfLayer) -> torch.Tensor:
    """A full weight with each element set to its index, as PyTorch stores it."""
    assert prod(one.shape) < 2**24
    return torch.arange(prod(one.shape), dtype=torch.float32).view(one.shape)


def numbered(one: WeightOfLayer, ranks: Ranks) -> torch.nn.Parameter:
    """The input of ``fully_shard``: the local shard in use, with its indices."""
    box = shard_box(one.in_use, ranks.mesh, one.shape, ranks.rank)
    assert box is not None
    empty, own = empty_parameter(one, ranks), numbers(one)[box.slices].contiguous()
    if isinstance(empty, DTensor):
        own = DTensor.from_local(
            own, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
        )
    return torch.nn.Parameter(own)


@pytest.fixture
def with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_stage, "empty_parameter", numbered)
    monkeypatch.setattr(torch.nn.Module, "to_empty", lambda module, **_: module)


def model_of(plan: Plan) -> Model:
    ranks = ranks_of(plan, torch.device("cpu"))
    return Model(plan, ranks)


@pytest.mark.usefixtures("with_numbers")
@pytest.mark.parametrize(("model", "layout", "mesh"), CASES, ids=[" ".join(case) for case in CASES])
def test_the_shard_is_the_box_of_the_plan(model: str, layout: str, mesh: str) -> None:
    assert_placed(plan_of(model, layout, mesh))


UNEVEN = [
    ("llama3-test", "fsdp", "fsdp=4", {"vocab": "2047", "mlp": "510"}),
    ("llama3-test", "fsdp", "fsdp=4", {"vocab": "5"}),
    ("llama3-test", "fsdp-tp", "fsdp=4,tensor=2", {"vocab": "2050"}),
    ("mixtral-test", "ep", "fsdp=4,expert=2", {"num_experts": "10"}),
]
FEW_EXPERTS = [
    ("mixtral-test", "fsdp", "fsdp=4", {"num_experts": "2"}),
    ("mixtral-test", "hsdp", "data=2,fsdp=4", {"num_experts": "2"}),
    ("mixtral-test", "ep", "fsdp=4,expert=2", {"num_experts": "2"}),
    ("mixtral-test", "tp-as-ep", "fsdp=4,tensor=2", {"num_experts": "2"}),
]


@pytest.mark.usefixtures("with_numbers")
@pytest.mark.parametrize(("model", "layout", "mesh", "changed"), FEW_EXPERTS)
def test_experts_of_fewer_than_ranks_are_stored_on_another_dim(
    model: str, layout: str, mesh: str, changed: dict[str, str]
) -> None:
    """PyTorch pads dim 0, and pads no other: the shards are equal, and all that a group gathers is of the model."""
    plan = plan_of(model, layout, mesh, **changed)
    experts = [one for one in weights_of(plan) if one.component == "moe"]
    assert {one.storage_dim for one in experts} == {1}
    for one in experts:
        assert one.shard_elements(plan.mesh) * plan.mesh.size(one.at_rest.axes) == prod(one.shape)
    assert_placed(plan)


@pytest.mark.usefixtures("with_numbers")
@pytest.mark.parametrize(
    ("model", "layout", "mesh", "changed"), UNEVEN, ids=[" ".join([*case[:3], str(case[3])]) for case in UNEVEN]
)
def test_shards_of_different_sizes_are_those_of_the_plan(
    model: str, layout: str, mesh: str, changed: dict[str, str]
) -> None:
    """Some shards are smaller, or empty."""
    plan = plan_of(model, layout, mesh, **changed)
    ranks = range(plan.mesh.num_devices)
    boxes = [[one.box(plan.mesh, rank) for rank in ranks] for one in weights_of(plan)]
    assert any(len({box and box.shape for box in of_weight}) > 1 for of_weight in boxes)
    assert_placed(plan)


DRAWN = range(40)


def drawn(seed: int) -> Plan:
    """A preset under a random mesh of at most 12 ranks, on a model with random sizes that the plan accepts."""
    random = Random(seed)
    while True:
        layout = load_layout(random.choice([name for name in preset_names() if name not in NOT_RUN]))
        sizes = {axis: random.choice((1, 2, 2, 3, 4)) for axis in layout.mesh}
        model = random.choice(list(MODELS))
        changed = {"vocab": str(random.randint(3, 300)), "mlp": str(random.choice((96, 510, random.randint(5, 400))))}
        if model == "mixtral-test":
            changed["num_experts"] = str(random.choice((2, 3, 4, 8)))
        if not 4 <= prod(sizes.values()) <= 12:
            continue
        try:
            plan = make_plan(
                Request(
                    layout=layout,
                    table=build(model, {**MODELS[model], **changed}),
                    batch=prod(sizes.values()),
                    length=48,
                    mesh_sizes=sizes,
                    engine="torch",
                )
            )
        except FindingsError:
            continue
        if not plan.errors:
            return plan


def test_the_draws_are_of_every_kind() -> None:
    plans = [drawn(seed) for seed in DRAWN]
    weights = [(plan, one) for plan in plans for one in weights_of(plan)]
    several = [
        (plan, one) for plan, one in weights if len(one.gathered) > 1 and one.shape[0] % plan.mesh.size(one.gathered)
    ]
    assert len({plan.request.layout.name for plan, _ in several}) >= 4
    assert sum(one.saved_shape != one.shape for _, one in weights) >= 4
    assert len({plan.request.layout.name for plan in plans}) >= 10


@pytest.mark.usefixtures("with_numbers")
@pytest.mark.parametrize("seed", some(DRAWN, range(8)))
def test_drawn_sizes_under_drawn_meshes_are_placed_as_planned(seed: int) -> None:
    assert_placed(drawn(seed))


def assert_placed(plan: Plan) -> None:
    for rank in range(plan.mesh.num_devices):
        with as_rank(rank, plan.mesh.num_devices):
            placed = model_of(plan)
            parameters = placed.parameters()
            assert {one.key for one in placed.weights} == parameters.keys()
            for one in placed.weights:
                parameter = parameters[one.key]
                assert_keeps(parameter, one, plan.mesh, rank)
                assert_named(parameter, one, plan.mesh)


def assert_keeps(parameter: torch.Tensor, one: WeightOfLayer, mesh: Mesh, rank: int) -> None:
    box = one.box(mesh, rank)
    kept = local_of(parameter)
    same = kept.numel() == 0 if box is None else torch.equal(kept, numbers(one)[box.slices])
    assert same, f"{one.key}: not {box} on rank {rank}"


def assert_named(parameter: torch.Tensor, one: WeightOfLayer, mesh: Mesh) -> None:
    """Its placements are those of the spec, on a mesh in which the gathered axes are one axis, the first."""
    spec, joined = as_fully_shard_names(one.at_rest, one.in_use, mesh)
    predicted = dict(zip(joined.names, placements_of(spec, joined), strict=True))
    found: dict[str, TorchPlacement] = {}
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names
        assert names is not None
        found = {
            name: placement
            for name, placement in zip(names, parameter.placements, strict=True)
            if not isinstance(placement, TorchReplicate)
        }
    wanted = {axis: in_torch(placement) for axis, placement in predicted.items()}
    assert list(found.items()) == list(wanted.items()), one.key


def in_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()


STRIDED = {
    "llama3-test": "layers.0.attention.q",
    "mixtral-test": "layers.0.attention.k",
    "deepseek3-test": "moe_layers.0.attention.kv_up",
}


@pytest.mark.parametrize(("model", "key"), STRIDED.items())
def test_tensor_parallel_weights_are_strided_in_every_family(model: str, key: str) -> None:
    """``tensor`` shards heads in use, and ``fsdp`` shards the rest of the same dim at rest: strided shards in mesh order."""
    with as_rank(0, 4):
        parameter = model_of(plan_of(model, "fsdp-tp", "fsdp=2,tensor=2")).parameters()[key]
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.mesh_dim_names == ("fsdp", "tensor")
        assert parameter.placements == (_StridedShard(0, split_factor=2), TorchShard(0))
