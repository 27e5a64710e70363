"""A compiled program's collectives and FLOPs in one run, as our reader finds them, against a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from shardwright.compiled.reading.flops import read_flops
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.compiled.reading.read import read
from shardwright.compiled.text.calls import callers_of, executions
from shardwright.compiled.text.hlo import parse
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.reductions import AMAX_DTYPE
from shardwright.cost.steps.flops import step_flops
from shardwright.engine_jax.lowering.links import links_of

FLOAT = "float32"


@dataclass(frozen=True, slots=True)
class NoStats:
    """Memory sizes that no test uses."""

    arguments_bytes: int = 0
    temporaries_bytes: int = 0
    output_bytes: int = 0
    aliased_bytes: int = 0
    peak_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program's text."""

    text: str

    def collectives(self, mesh: Mesh) -> tuple[CompiledCollective, ...]:
        """Every tensor of a collective; equal ones are one row. Each loop around a collective must have a known trip count."""
        found = read(self.text, mesh, target="cpu", stats=NoStats(), compile_seconds=0.0).collectives
        assert all(one.trips_known for one in found), found
        return found

    def flops(self, blocks: Fraction | None = None) -> Fraction:
        """Two for each multiplication in the matrix products of one device.

        ``blocks``: the iterations of the loop over blocks of experts' rows, which depend on the tokens.
        """
        program = parse(self.text)
        flops = read_flops(program, executions(program, callers_of(program), blocks))
        assert flops is not None, "a loop with products does not say how often it runs"
        return sum(flops.values(), Fraction(0))


def assert_program_is_the_plan(text: str, plan: Plan) -> None:
    """The program's collectives have the bytes of the plan, by kind and axes.

    Sums are compared, because stacked layers are reduced as one array. In addition to the plan's collectives there are three
    all-reduces over a sharded vocabulary in the loss, those of single numbers (the loss, norms), and those of counts, which are
    integers. What is the same in every microbatch may be gathered once for all of them.
    """
    moved = Program(text).collectives(plan.mesh)
    ragged = {row.axes for row in plan.collectives if row.ragged}
    for axes in ragged:
        _assert_exchanged(moved, plan, axes)
    ours: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in moved:
        if one.kind == "all-to-all" and one.axes in ragged:
            continue
        if one.dtypes == (FLOAT,) and one.bytes_per_device > DTYPE_BYTES[FLOAT]:
            ours[one.kind, one.axes] += one.bytes_per_device * one.count_per_step
    theirs, once = planned_bytes(plan)
    differences = {key: ours[key] - theirs[key] for key in {*ours, *theirs} if ours[key] != theirs[key]}
    differences = {key: found for key, found in differences.items() if found != -once[key]}
    assert not differences, (differences, ours, theirs)


def assert_steps_are_planned(text: str, plan: Plan) -> None:
    """The program has the collectives of the plan, and each device its own FLOPs."""
    assert_program_is_the_plan(text, plan)
    assert_flops_are_the_model_s(text, plan)


def assert_flops_are_the_model_s(text: str, plan: Plan) -> None:
    """A device multiplies what the model does, and no axis repeats it. Experts have equal loads. In stages: a device of the rank that
    computes the longest."""
    experts = links_of(plan.program or plan).experts
    # Without the padding of the last blocks.
    blocks = None if experts is None else Fraction(experts.traffic.assignments, experts.products.rows)
    flops = sum(step_flops(plan).values())
    if plan.pipeline is not None:
        own = [plan.stage_plans[stage.number] for stage in plan.pipeline.of_rank(plan.pipeline.slowest)]
        own += [] if plan.ends_plan is None else [plan.ends_plan]
        flops = plan.request.microbatches * sum(sum(step_flops(one).values()) for one in own)
    assert Program(text).flops(blocks) == flops


def _assert_exchanged(moved: tuple[CompiledCollective, ...], plan: Plan, axes: tuple[str, ...]) -> None:
    """CPU pads chunks of different lengths: there are as many all-to-alls as planned, with at least the planned bytes."""
    planned = [row for row in plan.collectives if row.kind == "all-to-all" and row.axes == axes]
    planned = [row for row in planned if plan.by_name[row.tensors[0]].dtype == FLOAT]
    found = [one for one in moved if one.kind == "all-to-all" and one.axes == axes and one.dtypes == (FLOAT,)]
    assert all(one.group_size == plan.mesh.size(axes) for one in found), (found, planned)
    assert sum(one.count_per_step for one in found) == sum(row.count_per_step for row in planned), (found, planned)
    least = sum(row.bytes_per_device * row.count_per_step for row in planned)
    assert sum(one.bytes_per_device * one.count_per_step for one in found) >= least, (found, planned)


def assert_amaxes_are_planned(text: str, plan: Plan) -> None:
    """The program reduces as many amaxes as the plan says, over the same axes."""
    ours: Counter[tuple[str, ...]] = Counter()
    for one in Program(text).collectives(plan.mesh):
        if one.maximum:
            ours[one.axes] += one.bytes_per_device * one.count_per_step
    theirs: Counter[tuple[str, ...]] = Counter()
    for row in plan.collectives:
        if row.dtype == AMAX_DTYPE:
            theirs[row.axes] += row.bytes_per_device * row.count_per_step
    assert ours == theirs
    assert ours


def planned_bytes(plan: Plan) -> tuple[Counter[tuple[str, tuple[str, ...]]], Counter[tuple[str, tuple[str, ...]]]]:
    """Bytes by kind and axes of the plan's collectives in float32, and those that may be omitted in later microbatches. Those with a dtype
    of their own are codes, scales and amaxes."""
    theirs: Counter[tuple[str, tuple[str, ...]]] = Counter()
    once: Counter[tuple[str, tuple[str, ...]]] = Counter()
    rows, repeats = plan.by_name, plan.request.microbatches - 1
    ragged = {row.axes for row in plan.collectives if row.ragged}
    for row in plan.collectives:
        tensor = rows[row.tensors[0]]
        if tensor.dtype != FLOAT or row.dtype is not None or (row.kind == "all-to-all" and row.axes in ragged):
            continue
        theirs[row.kind, row.axes] += row.bytes_per_device * row.count_per_step
        if tensor.kind == "weight" and tensor.stack is None and row.kind == "all-gather":
            once[row.kind, row.axes] += row.bytes_per_device * row.count_per_step * repeats // plan.request.microbatches
    scores = rows["logits.scores"]
    if vocabulary := plan.mesh.larger_than_one(scores.in_use.axes_of("vocab")):
        tokens = scores.bytes_per_device // (scores.shape[-1] // plan.mesh.size(vocabulary))
        theirs["all-reduce", vocabulary] += 3 * tokens
    return theirs, once
