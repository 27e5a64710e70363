"""SW301: weights of experts are gathered where the layout sends tokens, or the reverse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import total
from shardwright.compiled.agreement.widths import widest_float, width
from shardwright.compiled.findings.fixes import Fixable, moe_moves
from shardwright.compiled.findings.wording import cost_of, of_tensors, place, several_times
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import every
from shardwright.core.plan.plan import Plan, PlannedCollective, TensorPlan

MOVES = {
    "all-to-all": "tokens sent: all-to-all",
    "two-hops": "tokens sent in two hops: all-to-all over nodes, and inside them",
    "ring": "tokens sent around a ring: all-gather and reduce-scatter",
    "weights": "weights gathered: all-gather, and reduce-scatter of their gradients",
}


def experts(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Fixable]:
    """An error if the program moves weights instead of tokens or the reverse; a warning for other collectives of tokens."""
    layout = plan.request.layout
    axes = plan.mesh.larger_than_one(plan.mesh.in_mesh_order(layout.axes_with("expert", "moe")))
    rows = [row for row in plan.weights if row.component == "moe" and "experts" in row.in_use.logical_axes]
    if not axes or not rows:
        return
    there = [one for one in program.collectives if one.component in ("moe", None) and set(one.axes) & set(axes)]
    unplanned = [one for one in there if agreement.row_of(one).state == "unmatched"]
    weights = [one for one in unplanned if _of_weights(plan, one, rows)]
    tokens = [one for one in there if one.kind == "all-to-all" and one.component == "moe"]
    gathered = [one for one in unplanned if one.component == "moe" and one not in weights and _of_tokens(one)]
    planned = [one for one in plan.collectives if one.component == "moe" and set(one.axes) & set(axes)]
    moves = layout.move_moe
    if moves != "weights" and weights:
        yield _finding(plan, axes, moves, planned, weights, "error", "weights gathered")
    elif moves == "weights" and tokens:
        yield _finding(plan, axes, moves, planned, tokens, "error", "tokens exchanged")
    elif moves in ("all-to-all", "two-hops") and gathered and not tokens:
        yield _finding(plan, axes, moves, planned, gathered, "warning", "tokens gathered, not exchanged")


def _finding(
    plan: Plan,
    axes: Sequence[str],
    moves: str,
    planned: Sequence[PlannedCollective],
    found: Sequence[CompiledCollective],
    severity: Severity,
    what: str,
) -> Fixable:
    kinds = every(dict.fromkeys(one.kind for one in found))
    wanted, compiled = total(planned), total(found)
    times, runs = (sum(one.count_per_step for one in ones) for ones in (planned, found))
    finding = Finding(
        code="SW301",
        severity=severity,
        where=place("moe", kinds, axes),
        position=plan.request.layout.entries[axes[0]].position,
        tensor=next((name for one in found for name in one.tensors), None),
        found=f"{what}: {several_times(compiled, runs)}{of_tensors(found)}",
        needed=f"{MOVES[moves]}, {several_times(wanted, times, like=compiled)}",
        cost=cost_of(plan, compiled - wanted, axes) if compiled > wanted else "",
    )

    def cheaper(changed: Plan) -> bool:
        moved = [one for one in changed.collectives if one.component == "moe" and set(one.axes) & set(axes)]
        return total(moved) < max(compiled, wanted)

    # If the compiler exchanges tokens anyway, the fix is to declare that; otherwise the fix is another move.
    options = ("all-to-all",) if moves == "weights" else ("ring", "weights")
    return Fixable(draft=Draft(finding=finding, candidates=moe_moves(plan, options)), holds=cheaper)


def _of_weights(plan: Plan, one: CompiledCollective, rows: Sequence[TensorPlan]) -> bool:
    """Whether a collective moves the experts' weights or their gradients: by its name, else by its size."""
    if one.kind not in ("all-gather", "reduce-scatter", "all-reduce"):
        return False
    names = {row.name for row in rows}
    if one.tensors:
        return bool(names & set(one.tensors))
    return one.component == "moe" and one.bytes_per_device in _gathered_sizes(plan, rows, one)


def _gathered_sizes(plan: Plan, rows: Sequence[TensorPlan], one: CompiledCollective) -> set[int]:
    """Bytes of one layer of each weight after gathering it over the axes of a collective, in dtypes of 2 and 4 bytes."""
    sizes = set()
    for row in rows:
        local_elements = row.bytes_per_device // width(row.dtype)
        gathered_axes = [axis for axis in row.spec.axes if axis in one.axes]
        sizes |= {local_elements * plan.mesh.size(gathered_axes) * wide for wide in (2, 4)}
    return sizes


def _of_tokens(one: CompiledCollective) -> bool:
    return one.kind in ("all-gather", "reduce-scatter", "all-reduce") and widest_float(one.dtypes) is not None
