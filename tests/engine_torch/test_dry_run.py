"""A dry run of a step without devices: its collectives are the plan's to the byte, and its memory is the state and more.

The counts are compared with PyTorch's own ``CommDebugMode``, and the bytes at rest with the boxes that the core gives a rank.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import Plan, Request, load_layout, make_plan, model_table
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.findings.errors import FindingsError
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch.dry_run import counting, dry_run, imagined
from shardwright.engine_torch.dry_run.counting import CountedCollective, Counting
from shardwright.engine_torch.dry_run.dry_run import DryRun
from shardwright.engine_torch.dry_run.held import Held
from shardwright.engine_torch.io import private
from shardwright.layouts import preset_names
from shardwright.models import build
from tests.matrix import some
from tests.sameness.own_layouts import own_layout

FOUR = {"microbatches": 4, "batch": 64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    model: str
    layout: str
    sizes: tuple[tuple[str, int], ...]
    move: tuple[tuple[str, str], ...] = ()
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        options = ",".join(f"{name}={value}" for name, value in (*self.sizes, *self.move, *self.options))
        return f"{self.model}-{self.layout}-{options}"


def case(model: str, layout: str, move: dict[str, str] | None = None, /, **sizes: object) -> Case:
    axes = tuple((name, size) for name, size in sizes.items() if isinstance(size, int) and name != "microbatches")
    options = tuple((name, value) for name, value in sizes.items() if (name, value) not in axes)
    return Case(model=model, layout=layout, sizes=axes, move=tuple((move or {}).items()), options=options)  # pyright: ignore[reportArgumentType]


RESTING = {"dtype": "bfloat16", "weights_dtype": "bfloat16", "master_dtype": "float32"}
RESTING_BLOCKS = case("llama3-test", "hsdp", data=4, fsdp=2, precision="fp8-block", rest_quantized="true", **RESTING)
HYBRID = case("llama3-test", "hsdp", data=4, fsdp=4, microbatches=4, dtype="bfloat16")
HYBRID_ZERO2 = case("llama3-test", "hsdp-zero2", data=4, fsdp=4, microbatches=4)
CASES = (
    case("llama3-test", "fsdp", fsdp=16, microbatches=4),
    case("llama3-test", "fsdp", fsdp=48),
    case("llama3-test", "ddp", data=16, microbatches=4),
    HYBRID,
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, microbatches=4),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, remat="dots"),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, remat="none"),
    case("deepseek3-test", "ep", fsdp=4, expert=4, remat="none@moe_layers+full"),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, remat="full@0:4:3+dots@::2+none"),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, precision="fp8-current"),
    case("llama3-test num_layers=2", "fsdp-tp", fsdp=4, tensor=2, precision="mxfp8", gather_quantized="true"),
    case("llama3-test", "hsdp", data=4, fsdp=4, remat="none", precision="fp8-row", gather_quantized="true"),
    case("mixtral-test", "ep-as-cp", fsdp=4, expert=4, precision="fp8-current", gather_quantized="true"),
    case("llama3-test", "cp", fsdp=4, context=4),
    case("llama3-test", "cp", {"move_attention": "ring"}, fsdp=4, context=4),
    case("mixtral-test", "ep", fsdp=4, expert=4, microbatches=4),
    case("deepseek3-test", "ep", {"move_moe": "ring"}, fsdp=4, expert=4),
    case("mixtral-test", "ep-as-cp", fsdp=4, expert=4, precision="fp8-current"),
    case("mixtral-test", "ep", {"move_moe": "weights"}, fsdp=4, expert=4),
    case("deepseek3-test", "ep", fsdp=4, expert=4, microbatches=4),
    case("deepseek3-test", "ep-as-cp", {"move_attention": "ring"}, fsdp=4, expert=4),
    case("deepseek3-test", "fsdp-tp", fsdp=4, tensor=2),
    case("llama3-test", "hsdp", data=4, fsdp=4, precision="fp8-current"),
    case("mixtral-test", "ep", {"move_moe": "ring"}, fsdp=4, expert=4),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, microbatches=4, precision="fp8-delayed"),
    case("deepseek3-test", "ep-as-cp", {"move_attention": "ring"}, fsdp=4, expert=4, precision="fp8-delayed"),
    case("mixtral-test", "ep", fsdp=4, expert=4, microbatches=4, precision="fp8-delayed", gather_quantized="true"),
    case("llama3-test", "zero1", data=16, microbatches=4),
    case("llama3-test", "zero2", data=16, microbatches=4, dtype="bfloat16"),
    case("llama3-test", "hsdp-zero1", data=4, fsdp=4, microbatches=4),
    HYBRID_ZERO2,
    case("llama3-test", "zero-tp", data=2, replica=2, tensor=4, microbatches=4),
    case("mixtral-test", "zero-ep", data=2, fsdp=2, expert=4, microbatches=4),
    case("mixtral-test", "zero-ep", data=2, fsdp=2, expert=4, precision="fp8-row", gather_quantized="true"),
    case(
        "mixtral-test num_layers=2",
        "ep",
        fsdp=4,
        expert=4,
        precision="mxfp8",
        dispatch_quantized="true",
        dtype="bfloat16",
    ),
    case(
        "deepseek3-test", "ep", {"move_moe": "ring"}, fsdp=4, expert=4, precision="fp8-row", dispatch_quantized="true"
    ),
    case("llama3-test", "kept", fsdp=16, microbatches=4),
    case("mixtral-test", "kept-ep", fsdp=4, expert=4, remat="dots"),
    case("mixtral-test", "ep", fsdp=2, expert=4, precision="fp8-current", rest_quantized="true", **RESTING),
    RESTING_BLOCKS,
    case(
        "deepseek3-test num_layers=2", "ep-as-cp", {"move_attention": "ring"}, fsdp=4, expert=4, precision="fp8-current"
    ),
    case("llama3-test", "cp", fsdp=4, context=4, remat="keep=residual.middle,attention.keys_attended"),
    case("llama3-test", "cp", {"move_attention": "ring"}, fsdp=4, context=4, remat="keep=attention.attended,mlp.gate"),
    case(
        "deepseek3-test num_layers=2",
        "ep",
        fsdp=4,
        expert=4,
        remat="keep=moe.dispatched,attention.latent,host=residual.stream",
    ),
    case("mixtral-test", "ep", fsdp=4, expert=4, remat="dots,host=router.returned,recompute=router.scores@::2+none"),
    case("deepseek3-test", "ep", {"move_moe": "ring"}, fsdp=4, expert=4, remat="keep=moe.output,moe.gate,moe.up"),
    case("llama3-test", "fsdp-tp", fsdp=4, tensor=4, precision="fp8-current", remat="keep=mlp.gate,mlp.up"),
    case("llama3-test", "hsdp", data=4, fsdp=4, precision="mxfp8", gather_quantized="true", remat="dots"),
    case("deepseek3-test", "ep-nodes", fsdp=2, node=2, expert=4, microbatches=4),
    case("mixtral-test", "ep-nodes", fsdp=2, node=4, expert=2, remat="keep=moe.dispatched,host=router.returned"),
    case(
        "mixtral-test num_layers=2",
        "ep-nodes",
        fsdp=2,
        node=2,
        expert=4,
        precision="mxfp8",
        dispatch_quantized="true",
        dtype="bfloat16",
    ),
)


OF_CODES = ("gather_quantized", "rest_quantized", "dispatch_quantized")


def plan_of(one: Case) -> Plan:
    layout = load_layout(one.layout) if one.layout in preset_names() else own_layout(one.layout)
    layout = replace(layout, **dict(one.move))
    options = {"batch": 48, "length": 64, **dict(one.options)}
    if "microbatches" in options:
        options |= FOUR
    elif dict(one.sizes).get("fsdp") != 48:
        options["batch"] = 16
    if "precision" in options:
        given = {name: bool(options.pop(name, "")) for name in OF_CODES}
        options["precision"] = replace(preset(str(options["precision"])), **given)
    name, *settings = one.model.split()
    table = build(name, dict(setting.split("=") for setting in settings))
    return make_plan(Request(layout=layout, table=table, mesh_sizes=dict(one.sizes), engine="torch", **options))  # pyright: ignore[reportArgumentType]


@cache
def found_of(one: Case) -> DryRun:
    return dry_run.dry_run(plan_of(one))


def is_unlisted(one: CountedCollective) -> bool:
    """Sums of single numbers and of integers, and those of the loss over a sharded vocabulary, which no plan lists."""
    integers = all(dtype.startswith("int") for dtype in one.dtypes)
    return one.component is None or one.component == "logits" or (integers and one.component == "moe")


@pytest.mark.parametrize("case", some(CASES, (1, 8, 10, 16, 30, 34, 40, 43)), ids=str)
def test_the_counted_collectives_are_those_of_the_plan(case: Case) -> None:
    plan = plan_of(case)
    expected: Counter[tuple[object, ...]] = Counter()
    for row in plan.collectives:
        expected[row.component, row.phase, row.kind, row.axes, row.bytes_per_device] += row.count_per_step
    found: Counter[tuple[object, ...]] = Counter()
    unlisted = []
    for one, count in found_of(case).collectives:
        key = (one.component, one.phase, one.kind, one.axes, one.bytes_per_device)
        if key in expected or not is_unlisted(one):
            found[key] += count
        else:
            unlisted.append(one)
    assert found == expected
    assert all(one.source is not None for one in unlisted)


def test_replicas_are_summed_once_whatever_the_microbatches() -> None:
    sums = [(one.component, count) for one, count in found_of(HYBRID).collectives if one.axes == ("data",)]
    # The ends of the model and each of six layers, and their norms, which are gathered in float32.
    assert sorted(sums) == [("embedding", 1), ("mlp", 6), ("residual", 1), ("residual", 6)]


# CommDebugMode hooks into every module, and the outermost has no input with a gradient.
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_the_counts_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(case("llama3-test", "fsdp-tp", fsdp=4, tensor=4))
    debug = CommDebugMode()
    changed = imagined.changed

    def watched(*arguments):
        with debug:
            return changed(*arguments)

    monkeypatch.setattr(imagined, "changed", watched)
    found: Counter[str] = Counter()
    for one, count in dry_run.dry_run(plan).collectives:
        found[one.kind] += count
    theirs = {counting.KINDS[str(name).split(".")[1]]: count for name, count in debug.get_comm_counts().items()}
    assert dict(found) == theirs


def test_microbatches_that_are_not_run_are_like_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    short = dict(found_of(HYBRID).collectives)
    monkeypatch.setattr(dry_run, "MICROBATCHES", 4)
    assert dict(dry_run.dry_run(plan_of(HYBRID)).collectives) == short


@pytest.mark.parametrize(
    "one",
    [
        case("llama3-test", "fsdp", fsdp=48),
        HYBRID,
        case("deepseek3-test", "ep-as-cp", {"move_attention": "ring"}, fsdp=4, expert=4),
    ],
    ids=str,
)
def test_the_bytes_at_rest_are_those_of_the_cores_boxes(one: Case) -> None:
    plan, found = plan_of(one), found_of(one)
    weights = 0
    for row in plan.weights:
        assert row.at_rest is not None
        box = shard_box(row.at_rest, plan.mesh, row.shape, 0, in_turn=row.in_use.axes)
        assert box is not None
        weights += prod(box.shape) * row.num * DTYPE_BYTES[row.dtype]
    assert found.weights_bytes == weights
    trained = weights - sum(
        row.bytes_per_device * row.num for row in plan.weights if not row.gradient and "bias" in row.name
    )
    assert (found.gradients_bytes, found.moments_bytes) == (trained, 2 * trained)
    assert found.peak_bytes > weights + 3 * trained


@pytest.mark.matrix
def test_codes_of_experts_at_rest_have_padding_where_there_are_more_devices() -> None:
    uneven = case(
        "mixtral-test", "ep-as-cp", fsdp=4, expert=4, precision="fp8-current", rest_quantized="true", **RESTING
    )
    plan, found = plan_of(uneven), found_of(uneven)
    assert (found.weights_bytes, found.moments_bytes) == (plan.memory.weights_bytes, plan.memory.optimizer_bytes)


@pytest.mark.matrix
def test_codes_at_rest_take_the_memory_that_is_planned() -> None:
    """Blocks of 128 x 128: a byte an element in place of two, and a scale for each block."""
    plan, found = plan_of(RESTING_BLOCKS), found_of(RESTING_BLOCKS)
    assert found.weights_bytes == plan.memory.weights_bytes
    quantized = {one.name for one in plan.quantized}
    elements = sum(row.num * prod(row.shape) // 2 for row in plan.weights if row.name in quantized)
    assert plan.memory.narrowed_bytes == elements - 4 * elements // 128**2
    assert found.moments_bytes == plan.memory.optimizer_bytes


def test_activations_kept_for_the_backward_pass_count() -> None:
    peaks = [
        dry_run.dry_run(plan_of(case("llama3-test", "fsdp", fsdp=16, remat=remat))).peak_bytes
        for remat in ("full", "dots", "none")
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[-1]


def test_layers_that_keep_all_compute_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of matrices in a step of six layers: those of three layers are computed again."""
    changed, counted = imagined.changed, Counter[str]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counted[remat] += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def watched(*arguments):
        with Products():
            return changed(*arguments)

    monkeypatch.setattr(imagined, "changed", watched)
    for remat in ("none", "full@0:6:2+none", "full"):
        dry_run.dry_run(plan_of(case("llama3-test", "fsdp", fsdp=16, remat=remat)))
    # Of the seven products of a layer, the last is none that its backward pass needs.
    assert counted["full"] - counted["none"] == 6 * 6
    assert counted["full@0:6:2+none"] - counted["none"] == 3 * 6


def test_a_storage_is_held_from_its_first_tensor_to_its_last() -> None:
    held = Held()
    with held.watching():
        first = torch.zeros(100)
        held.add(first)
        view = first[10:]
        held.add([view, None])
        assert (held.now, held.peak) == (400, 400)
        other = torch.zeros(50)
        held.add(other)
        other.untyped_storage().resize_(0)
        assert (held.now, held.peak) == (400, 600)
        del first
        assert held.now == 400
        del view
        assert (held.now, held.peak) == (0, 600)


def test_what_dtensor_makes_to_find_a_shape_is_not_held() -> None:
    """It runs an operation of another shape on tensors of the global shape once: that of 4,800 rows over 48 ranks."""
    with private.imagined_ranks(48):
        mesh = init_device_mesh("cpu", (48,))
        counting = Counting(Mesh((Axis(name="fsdp", size=48),)), {})
        with private.without_values(), counting, counting.held.watching():
            shard = DTensor.from_local(torch.zeros(100, 3), mesh, [Shard(0)])
            product = shard * shard
        assert product.shape == (4800, 3)
        assert counting.held.peak == 2 * 100 * 3 * 4


def test_attention_over_a_latent_holds_no_scores() -> None:
    """All scores of a row of 1,024 tokens are 16 MiB, several times in a backward pass: the plan has none of them."""
    request = plan_of(case("deepseek3-test", "fsdp", fsdp=16)).request
    plan = make_plan(replace(request, length=1024))
    assert dry_run.dry_run(plan).peak_bytes < plan.memory.total_bytes_per_device


def test_a_dry_run_of_experts_that_drop_tokens() -> None:
    table = build("mixtral-test", {"capacity_factor": "1.25"})
    request = Request(
        layout=load_layout("ep-as-cp"),
        table=table,
        mesh_sizes={"fsdp": 4, "expert": 4},
        batch=16,
        length=64,
        engine="torch",
    )
    found = dry_run.dry_run(make_plan(request))
    assert found.even
    assert any(one.kind == "all-to-all" and "float32" in one.dtypes for one, _ in found.collectives)


def test_no_group_is_left_behind() -> None:
    dry_run.dry_run(plan_of(case("llama3-test", "fsdp", fsdp=16)))
    assert not dist.is_initialized()


def test_a_plan_that_is_not_lowered_is_refused_before_there_is_a_group() -> None:
    request = Request(
        layout=load_layout("pp"),
        table=model_table("llama3-test"),
        mesh_sizes={"stage": 2},
        batch=16,
        length=64,
        engine="torch",
        schedule="circular",
    )
    with pytest.raises(FindingsError, match=r"SW415.*\n.*stage"):
        dry_run.dry_run(make_plan(request))
    assert not dist.is_initialized()
