"""SW304, SW305, SW306: collectives of more than is used of them, or of more than they were computed from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import AgreementRow, total
from shardwright.compiled.agreement.rewrites import family
from shardwright.compiled.agreement.widths import widest_float
from shardwright.compiled.findings.wording import cost_of, of_tensors, place, place_of, seconds_of, several_times
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import EXPANDED_WARNING_RATIO, GATHERED_ERROR_SHARE
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.plan import Plan, PlannedCollective

SLICES = ("slice", "dynamic-slice")
SHOWN = 3
"""Lines of a compiler's log that a finding repeats."""

Key = tuple[str | None, tuple[str, ...]]


def gathered_in_full(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """SW304: a gather of which every user takes a slice, or a log line in which the compiler reports one."""
    found = [
        one
        for one in program.collectives
        if one.kind == "all-gather" and _only_sliced(one) and agreement.row_of(one).state == "unmatched"
    ]
    log_lines = "".join(f"\nthe compiler: {line}" for line in program.notes[:SHOWN])
    if len(program.notes) > SHOWN:
        log_lines += f"\nand {len(program.notes) - SHOWN} more such lines"
    for (component, axes), ones in _by_key(found).items():
        yield Finding(
            code="SW304",
            severity="error" if _share(plan, program, total(ones), axes) >= GATHERED_ERROR_SHARE.value else "info",
            where=place(component, "all-gather", axes),
            tensor=_first_tensor(ones),
            found=f"gathered in full, and sliced by every user: "
            f"{several_times(total(ones), _runs(ones))}{of_tensors(ones)}{log_lines}",
            needed="each shard sent to where it is used: an all-to-all or a permute of the shards",
            cost=cost_of(plan, total(ones), axes),
        )
    if program.notes and not found:
        yield Finding(
            code="SW304",
            severity="error",
            where=f"a step of {plan.request.table.name} under layout '{plan.request.layout.name}'",
            found=f"tensors replicated on every device{log_lines}",
            needed="a collective that reshards between the two layouts that the compiler names",
        )


def _share(plan: Plan, program: CompiledProgram, num_bytes: int, axes: tuple[str, ...]) -> float:
    """The share of the step that bytes over axes take; where a step has no time, their share of the bytes of the program's collectives."""
    seconds = seconds_of(plan, num_bytes, axes)
    if seconds is not None and plan.step is not None:
        return seconds / plan.step.seconds
    return num_bytes / total(program.collectives)


def expanded(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """SW305: a tensor is sent that was computed from a much smaller one with the same sharding alone."""
    seen: set[Key] = set()
    found = [
        one
        for one in program.collectives
        if one.kind != "all-reduce" and one.bytes_per_device > EXPANDED_WARNING_RATIO.value * _smaller(plan, one)
    ]
    for (component, axes), ones in _by_key(found).items():
        seen.add((component, axes))
        smaller = sum(_smaller(plan, one) * one.count_per_step for one in ones)
        yield _expanded(plan, component, axes, ones, smaller, "what it is computed from")
    for row in agreement.of_state("unmatched"):
        if row.kind not in ("all-gather", "all-to-all") or (row.component, row.axes) in seen:
            continue
        ones = [one for one in program.collectives if _is_of(plan, one, row)]
        planned = [one for one in plan.collectives if _is_of(plan, one, row)]
        if planned and total(ones) > EXPANDED_WARNING_RATIO.value * total(planned):
            yield _expanded(plan, row.component, row.axes, ones, total(planned), "what the plan moves")


def _is_of(plan: Plan, one: CompiledCollective | PlannedCollective, row: AgreementRow) -> bool:
    """Whether a collective of either side belongs to a row and moves activations."""
    tensors = [plan.by_name[name] for name in one.tensors if name in plan.by_name]
    return (
        (one.component, one.kind) == (row.component, row.kind)
        and set(one.axes) == set(row.axes)
        and any(tensor.kind == "activation" for tensor in tensors)
    )


def _smaller(plan: Plan, one: CompiledCollective) -> int:
    """The bytes of a collective if it sent the tensor from which its operand was expanded."""
    if one.made_from_bytes is None:
        return one.bytes_per_device
    return one.made_from_bytes * (plan.mesh.size(one.axes) if one.kind == "all-gather" else 1)


def _expanded(
    plan: Plan,
    component: str | None,
    axes: tuple[str, ...],
    ones: Sequence[CompiledCollective],
    smaller: int,
    what: str,
) -> Finding:
    moved = total(ones)
    return Finding(
        code="SW305",
        severity="warning",
        where=place(component, ones[0].kind, axes),
        tensor=_first_tensor(ones),
        found=f"{several_times(moved, _runs(ones))}, {moved / smaller:.3g} times {what}{of_tensors(ones)}",
        needed=f"the smaller tensor sent, {bytes_text(smaller, like=moved)} a step, and expanded on arrival",
        cost=cost_of(plan, moved - smaller, axes),
    )


def summed_and_sliced(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """SW306: an all-reduce of which every device keeps one shard. Not on CPU, where XLA has no reduce-scatter.

    Rows that a rewrite explains count too: they are as expensive.
    """
    if family(program.target.split(":")[0]) == "cpu":
        return
    found = [
        one
        for one in program.collectives
        if one.kind == "all-reduce"
        and (_only_sliced(one) or one.stands_for == "reduce-scatter")
        and agreement.row_of(one).state != "matched"
        and widest_float(one.dtypes) is not None
    ]
    for axes in dict.fromkeys(one.axes for one in found):
        ones = [one for one in found if one.axes == axes]
        size = plan.mesh.size(axes)
        yield Finding(
            code="SW306",
            severity="warning",
            where=place_of((one.component for one in ones), "all-reduce", axes),
            tensor=_first_tensor(ones),
            found=f"summed in full, and sliced by every user: "
            f"{several_times(total(ones), _runs(ones))}{of_tensors(ones)}",
            needed="a reduce-scatter, which sends half of it and leaves each device its shard",
            cost=cost_of(plan, total(ones) * (size - 1) / size, axes, "sent unnecessarily"),
        )


def _only_sliced(one: CompiledCollective) -> bool:
    return bool(one.users) and set(one.users) <= set(SLICES)


def _by_key(found: Sequence[CompiledCollective]) -> dict[Key, list[CompiledCollective]]:
    groups: dict[Key, list[CompiledCollective]] = {}
    for one in found:
        groups.setdefault((one.component, one.axes), []).append(one)
    return groups


def _first_tensor(found: Sequence[CompiledCollective]) -> str | None:
    return next((name for one in found for name in one.tensors), None)


def _runs(found: Sequence[CompiledCollective]) -> int:
    return sum(one.count_per_step for one in found)
