"""A user's own module on ranks: the shards of each rank against slices made by hand, and its steps against one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.boxes.placements import placements_of
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.own_program.module import parallelize
from tests.engine_torch import own_block
from tests.engine_torch.own_block import (
    CPU,
    NAMES_OF_KERNELS,
    NAMES_WITH_EXPERTS,
    Trained,
    along_rows,
    convolved,
    dense,
    kept_of,
    plan_of,
    train,
    unnormed,
    with_experts,
)
from tests.engine_torch.ranks import Ranks
from tests.matrix import rest

TENSOR = {"elsewhere": "tensor", "residual": "idle"}
ALONG_ROWS = {"elsewhere": "tensor", "sequence_parallel": True}
EXPERT = {"elsewhere": "fsdp", "moe": "expert"}
HSDP_TP: tuple[dict[str, Any], dict[str, int]] = (
    {"data": "data", "fsdp": "fsdp", "tensor": TENSOR},
    {"data": 2, "fsdp": 2, "tensor": 2},
)


@contextmanager
def rank(number: int, world: int) -> Iterator[None]:
    """This process as one rank of a process group whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=number, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_by_hand(module: nn.Module, plan: Plan, number: int) -> dict[str, np.ndarray]:
    """A rank's shard of each weight, by the boxes of the plan."""
    kept = {}
    for name, one in module.named_parameters():
        spec = plan.by_name[name].at_rest
        assert spec is not None
        box = shard_box(spec, plan.mesh, tuple(one.shape), number, in_turn=plan.by_name[name].in_use.axes)
        assert box is not None
        kept[name] = one.detach().numpy()[box.slices]
    return kept


def dim_and_factor(placement: object) -> tuple[int | None, int]:
    """The dim that a placement shards and its split factor, for PyTorch's placements and ours."""
    return getattr(placement, "dim", None), getattr(placement, "split_factor", 1)


@pytest.mark.parametrize("number", range(8))
def test_each_rank_keeps_what_the_plan_says(number: int) -> None:
    plan = plan_of(*HSDP_TP)
    module = dense()
    with rank(number, 8):
        parallelize(module, plan, device=CPU)
        kept = {name: kept_of(one) for name, one in module.named_parameters()}
        placements = {name: one.placements for name, one in module.named_parameters() if isinstance(one, DTensor)}
    expected = sharded_by_hand(dense(), plan, number)
    assert kept.keys() == expected.keys()
    for name, shard in expected.items():
        np.testing.assert_array_equal(kept[name], shard, err_msg=name)
    for name, found in placements.items():
        spec = plan.by_name[name].at_rest
        assert spec is not None
        assert list(map(dim_and_factor, found)) == list(map(dim_and_factor, placements_of(spec, plan.mesh))), name


CASES: Mapping[str, tuple[Callable[[], nn.Module], dict[str, Any], dict[str, int]]] = {
    "fsdp": (dense, {"data": "data", "fsdp": "fsdp"}, {"data": 1, "fsdp": 4}),
    "hsdp": (dense, {"data": "data", "fsdp": "fsdp"}, {"data": 2, "fsdp": 2}),
    "fsdp-tp": (unnormed, {"fsdp": "fsdp", "tensor": TENSOR}, {"fsdp": 2, "tensor": 2}),
    "ddp": (dense, {"data": "data"}, {"data": 4}),
    "ddp-tp": (unnormed, {"data": "data", "tensor": TENSOR}, {"data": 2, "tensor": 2}),
    "fsdp-tp along rows": (along_rows, {"fsdp": "fsdp", "tensor": ALONG_ROWS}, {"fsdp": 2, "tensor": 2}),
    "ddp-tp along rows": (along_rows, {"data": "data", "tensor": ALONG_ROWS}, {"data": 2, "tensor": 2}),
    "experts": (with_experts, {"fsdp": "fsdp", "expert": EXPERT}, {"fsdp": 2, "expert": 2}),
    "kernels": (convolved, {"data": "data", "fsdp": "fsdp"}, {"data": 2, "fsdp": 2}),
    "kernels under tensor": (convolved, {"fsdp": "fsdp", "tensor": TENSOR}, {"fsdp": 2, "tensor": 2}),
    "experts among replicas": (with_experts, {"data": "data", "expert": EXPERT}, {"data": 2, "expert": 2}),
}


def planned(case: str) -> tuple[Callable[[], nn.Module], Plan]:
    make, roles, sizes = CASES[case]
    names = {with_experts: NAMES_WITH_EXPERTS, convolved: NAMES_OF_KERNELS}.get(make)
    own: dict[str, Any] = {"module": make()} if names is None else {"names": names, "module": make()}
    rules = {"mlp": {"mlp": []}} if case == "kernels under tensor" else None
    return make, plan_of(roles, sizes, rules=rules, **own)


def assert_trained_as_one_device(answers: list[Trained], make: Callable[[], nn.Module], plan: Plan) -> None:
    alone = train(make, None)
    after = make()
    with torch.no_grad():
        for name, one in after.named_parameters():
            one.copy_(torch.from_numpy(alone.kept[name]))
    for number, answer in enumerate(answers):
        np.testing.assert_allclose(answer.losses, alone.losses, rtol=1e-5)
        for name, shard in sharded_by_hand(after, plan, number).items():
            np.testing.assert_allclose(answer.kept[name], shard, rtol=1e-5, atol=1e-5, err_msg=name)


# `make test` has both axes of data and both kinds of `tensor`, not each with each.
LEFT_OUT = {"fsdp", "ddp-tp", "fsdp-tp along rows"}


@pytest.mark.parametrize("case", [rest(case) if case in LEFT_OUT else case for case in CASES])
def test_steps_are_those_of_one_device(four: Ranks, case: str) -> None:
    make, plan = planned(case)
    assert_trained_as_one_device(four.run(train, make, plan), make, plan)


@pytest.mark.parametrize("case", ["hsdp", "ddp", "experts"])
def test_gradients_are_summed_on_request(four: Ranks, case: str) -> None:
    make, plan = planned(case)
    assert_trained_as_one_device(four.run(own_block.summing, make, plan), make, plan)


@pytest.mark.parametrize("step", [train, own_block.summing])
def test_equal_gradients_of_several_ranks_count_once(four: Ranks, step: Callable[..., Trained]) -> None:
    """A rule may store a weight over an axis that is idle in its component, whose ranks all have the same tokens."""
    rules = {"logits": {"vocab": ["fsdp", "spare"]}, "residual": {"norm": ["spare"]}}
    plan = plan_of({"fsdp": "fsdp", "spare": "idle"}, {"fsdp": 2, "spare": 2}, rules=rules)
    assert_trained_as_one_device(four.run(step, dense, plan), dense, plan)


def test_weights_are_gathered_in_the_dtype_of_the_computation(four: Ranks) -> None:
    make, roles, sizes = CASES["hsdp"]
    answers = four.run(train, make, plan_of(roles, sizes, dtype="bfloat16"))
    alone = train(make, None)
    assert all(shard.dtype == np.float32 for shard in answers[0].kept.values())
    np.testing.assert_allclose(answers[0].losses, alone.losses, rtol=1e-2)
    assert np.abs(np.subtract(answers[0].losses, alone.losses)).max() > 1e-5


@pytest.mark.parametrize(
    ("unlike", "message"),
    [
        ({}, ""),
        (
            {"angles": (2,), "blocks.1.seen": (1, 3)},
            "buffer 'angles' is not the same on all ranks: that of rank 2 is not that of rank 0. Make them equal before, with "
            "the same seed on every rank, or with torch.distributed.broadcast from rank 0.",
        ),
        (
            {"blocks.1.seen": (1, 2, 3)},
            "buffer 'blocks.1.seen' is not the same on all ranks: that of rank 1 (and of 2 more) is not that of rank 0. Make "
            "them equal before, with the same seed on every rank, or with torch.distributed.broadcast from rank 0.",
        ),
        (
            {"blocks.0.up.weight": (0,)},
            "weight 'blocks.0.up.weight' is not the same on all ranks: that of rank 1 (and of 2 more) is not that of rank 0. "
            "Make them equal before, with the same seed on every rank, or with torch.distributed.broadcast from rank 0.",
        ),
        (
            {"extra": (3,)},
            "the ranks do not have the same weights and buffers: those of rank 3 are not those of rank 0. Build the same module "
            "on each.",
        ),
    ],
    ids=["equal", "a buffer", "a buffer that is not saved", "a weight", "another module"],
)
def test_values_that_are_not_the_same_on_all_ranks(four: Ranks, unlike: dict[str, Any], message: str) -> None:
    assert four.run(own_block.refused, unlike, planned("hsdp")[1]) == [message] * 4


def test_kernels_are_sharded_at_rest_along_their_outputs_only() -> None:
    _, plan = planned("kernels")
    assert {name: str(row.at_rest) for name, row in plan.by_name.items() if name.startswith("blocks.0.")} == {
        "blocks.0.one.weight": "mlp/fsdp embed _taps",
        "blocks.0.one.bias": "mlp/fsdp",
        "blocks.0.two.weight": "mlp/fsdp embed _height _width",
        "blocks.0.two.bias": "mlp/fsdp",
        "blocks.0.three.weight": "mlp/fsdp embed _depth _height _width",
        "blocks.0.three.bias": "mlp/fsdp",
    }


def test_a_kernel_that_is_sharded_in_use() -> None:
    make, roles, sizes = CASES["kernels under tensor"]
    plan = plan_of(roles, sizes, make(), NAMES_OF_KERNELS)
    with rank(0, 4):
        assert refused(make(), plan) == (
            "'blocks.0.one.weight' is the kernel of a convolution, and tensor shards its dim 'mlp' in use. DTensor cannot "
            "convolve with it. Leave it unsharded by a rule of the layout: rules: {mlp: {mlp: []}}."
        )


def units(module: nn.Module) -> dict[str, list[str]]:
    """The modules that ``fully_shard`` was called on, by name, each with the names of its weights that no unit inside has."""
    found = {name: one for name, one in module.named_modules() if isinstance(one, FSDPModule)}
    own: dict[str, list[str]] = {name: [] for name in found}
    for key, _ in module.named_parameters():
        own[max((name for name in found if key.startswith(name)), key=len)].append(key)
    return own


def test_blocks_are_units_and_weights_gathered_over_other_axes_are_units_inside() -> None:
    make, plan = planned("experts")
    module = make()
    with rank(0, 4):
        parallelize(module, plan, device=CPU)
    assert units(module) == {
        "": ["tokens.weight"],
        "blocks.0": ["blocks.0.heat", "blocks.0.experts.up", "blocks.0.experts.down"],
        "blocks.0.router": ["blocks.0.router.weight"],
    }
    head, tokens = module.get_submodule("head"), module.get_submodule("tokens")
    assert head.weight is tokens.weight
    assert isinstance(module.get_parameter("blocks.0.experts.up"), DTensor)
    assert not isinstance(module.get_parameter("blocks.0.heat"), DTensor)


def test_the_caller_chooses_the_units() -> None:
    module = dense()
    with rank(0, 4):
        parallelize(module, planned("fsdp")[1], device=CPU, units=lambda name, _: name == "head")
    assert list(units(module)) == ["", "head"]
    assert units(module)["head"] == ["head.weight"]


def test_weights_without_values_stay_without() -> None:
    with torch.device("meta"):
        module = dense()
    module.get_parameter("blocks.1.q.weight").requires_grad = False
    with rank(5, 8):
        parallelize(module, plan_of(*HSDP_TP), device=CPU)
    assert all(one.is_meta for one in module.parameters())
    assert [name for name, one in module.named_parameters() if not one.requires_grad] == ["blocks.1.q.weight"]


def refused(module: nn.Module, plan: Plan, **options: Any) -> str:
    """The message for a module that cannot be sharded, which is then unchanged."""
    before = dict(module.named_parameters())
    with pytest.raises(InputError) as caught:
        parallelize(module, plan, device=CPU, **options)
    assert dict(module.named_parameters()) == before
    assert not any(isinstance(one, FSDPModule) for one in module.modules())
    return str(caught.value)


def test_a_process_group_of_another_size() -> None:
    plan = plan_of(*HSDP_TP)
    assert refused(dense(), plan) == (
        "there is no process group, and the plan is for 8 ranks (data 2 x fsdp 2 x tensor 2). Call "
        "torch.distributed.init_process_group() first; `torchrun --nproc-per-node 8` starts 8 on one host."
    )
    with rank(0, 4):
        assert refused(dense(), plan) == (
            "the process group has 4 ranks; the plan is for 8 (data 2 x fsdp 2 x tensor 2). "
            "`torchrun --nproc-per-node 8` starts 8 on one host."
        )


def test_a_plan_of_another_module_or_engine() -> None:
    _, plan = planned("fsdp")
    module = dense()
    module.get_submodule("head").register_parameter("bias", nn.Parameter(torch.zeros(64)))
    assert refused(module, plan) == "the plan has no weight 'head.bias'. Did you mean 'head.weight'?"
    module = dense()
    module.register_module("head", nn.Identity())
    assert refused(module, plan) == (
        "the module has no weight 'head.weight', which was planned. Did you mean 'tokens.weight'?"
    )
    module = dense()
    module.register_module("head", nn.Linear(32, 48, bias=False))
    assert refused(module, plan) == "weight 'head.weight' has shape (48, 32); it was planned as (64, 32)."
    assert refused(dense().to(torch.bfloat16), plan) == (
        "weight 'tokens.weight' is bfloat16; it was planned as float32. Give the Request weights_dtype='bfloat16', or cast "
        "the module."
    )
    assert refused(dense(), plan_of({"fsdp": "fsdp"}, {"fsdp": 4}, engine="jax")) == (
        "the plan is for 'jax', which shards other dims of the weights at rest. Make it from a Request with engine='torch'."
    )


def test_a_module_that_was_sharded_before() -> None:
    _, plan = planned("fsdp")
    module = dense()
    with rank(0, 4):
        parallelize(module, plan, device=CPU)
        with pytest.raises(InputError) as caught:
            parallelize(module, plan, device=CPU)
    assert str(caught.value) == "weight 'tokens.weight' is a DTensor already: the module has been sharded before."


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (
            "fsdp",
            {"weights_dtype": "bfloat16"},
            "the plan computes in float32, and 'tokens.weight' is stored in bfloat16: a module multiplies in that dtype. "
            "Give the Request dtype='bfloat16'.",
        ),
        (
            "ddp",
            {"dtype": "bfloat16"},
            "the plan computes in bfloat16, and 'tokens.weight' is stored in float32 and never gathered, and only gathered "
            "weights are cast. Give the Request dtype='float32', and compute under torch.autocast.",
        ),
    ],
)
def test_a_dtype_that_a_module_cannot_compute_in(case: str, options: dict[str, Any], message: str) -> None:
    make, roles, sizes = CASES[case]
    module = make().to(getattr(torch, options.get("weights_dtype", "float32")))
    assert refused(module, plan_of(roles, sizes, module, **options)) == message


def test_weights_that_cannot_be_gathered_in_one_unit() -> None:
    make, plan = planned("experts")
    module = make()
    with rank(0, 4):
        message = refused(module, plan, units=lambda name, _: name in ("tokens", "head"))
    assert message == (
        "'tokens.weight' and 'head.weight' are one weight, and two units would gather it: module 'head' and module "
        "'tokens'. Put both in one unit, with `units`."
    )

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.up = nn.Parameter(torch.zeros(4, 32)), nn.Parameter(torch.zeros(4, 96, 32))

    names = {"router": "router: scores embed", "up": "moe: experts mlp embed"}
    _, roles, sizes = CASES["experts"]
    with rank(0, 4):
        message = refused(Both(), plan_of(roles, sizes, Both(), names))
    assert message == (
        "the root module has itself 'router', which is gathered over fsdp and expert, and 'up', which is gathered over fsdp: "
        "`fully_shard` gathers a module's weights over one set of axes. Give one of them a module of its own."
    )


def test_layers_in_one_weight() -> None:
    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.zeros(4, 96, 32))

    plan = plan_of({"fsdp": "fsdp"}, {"fsdp": 4}, Stacked(), {"up": "mlp: layers mlp embed"})
    assert refused(Stacked(), plan) == (
        "weight 'up' has all layers stacked along dim 0, which `fully_shard` would shard. Give each layer its own parameter, "
        "as in the entries of an nn.ModuleList."
    )


@pytest.mark.parametrize("hidden", [94, 98])
def test_a_dim_with_shards_of_different_sizes_in_use_is_an_error_of_the_plan(hidden: int) -> None:
    module = nn.Sequential(nn.Linear(32, hidden, bias=False))
    plan = plan_of({"tensor": "tensor"} | {"fsdp": "fsdp"}, {"fsdp": 2, "tensor": 4}, module, {"*": "mlp: mlp embed"})
    with pytest.raises(FindingsError) as caught:
        parallelize(module, plan, device=CPU)
    assert {finding.code for finding in caught.value.findings} == {"SW104"}
    assert "in uneven shards" in str(caught.value)
