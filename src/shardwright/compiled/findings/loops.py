"""SW303: collectives in a loop that could run once, outside of it."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import TOLERANCE, total
from shardwright.compiled.findings.fixes import Fixable
from shardwright.compiled.findings.wording import cost_of, of_tensors, place, place_of, several_times
from shardwright.compiled.reading.program import CompiledCollective, CompiledProgram
from shardwright.core.checks.edits import option
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def loops(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding | Fixable]:
    """Replicas that are summed in every microbatch, and loop-invariant collectives."""
    yield from _replicas(plan, program, agreement)
    yield from _repeated(plan, program)


def _replicas(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """All-reduces over replicas in each microbatch, which could run once after the last: as many times the bytes."""
    microbatches = plan.request.microbatches
    late = [one for one in plan.collectives if one.phase == "update" and one.kind == "all-reduce"]
    for key in dict.fromkeys((one.component, one.axes) for one in late) if microbatches > 1 else ():
        component, axes = key
        wanted = [one for one in late if (one.component, one.axes) == key]
        found = [
            one
            for one in program.collectives
            if one.kind == "all-reduce"
            and one.component == component
            and set(one.axes) == set(axes)
            and one.in_loop
            and one.phase != "forward"
            and one.stands_for is None
            and agreement.row_of(one).state != "matched"
        ]
        if total(found) < microbatches * total(wanted) * (1 - TOLERANCE):
            continue
        yield Finding(
            code="SW303",
            severity="warning",
            where=place(component, "all-reduce", axes),
            tensor=wanted[0].tensors[0],
            position=plan.request.layout.entries[axes[0]].position,
            found=f"replicas summed in each of {microbatches} microbatches: "
            f"{several_times(total(found), _runs(found))}{of_tensors(found, 'gradient')}",
            needed=f"once a step, after the last microbatch: "
            f"{several_times(total(wanted), sum(one.count_per_step for one in wanted), like=total(found))}",
            cost=cost_of(plan, total(found) - total(wanted), axes),
        )


def _repeated(plan: Plan, program: CompiledProgram) -> Iterator[Fixable]:
    """One finding for each kind and axes of loop-invariant collectives."""
    repeated = [one for one in program.collectives if one.loop_invariant and one.count_per_step > one.num_ops]
    for kind, axes in dict.fromkeys((one.kind, one.axes) for one in repeated):
        found = [one for one in repeated if (one.kind, one.axes) == (kind, axes)]
        once = sum(one.bytes_per_device * one.num_ops for one in found)
        finding = Finding(
            code="SW303",
            severity="warning",
            where=place_of((one.component for one in found), kind, axes),
            tensor=next((name for one in found for name in one.tensors), None),
            found=f"the same in every iteration of its loop: "
            f"{several_times(total(found), _runs(found))}{of_tensors(found)}",
            needed=f"outside of the loop: {several_times(once, sum(one.num_ops for one in found), like=total(found))}",
            cost=cost_of(plan, total(found) - once, axes),
        )
        candidates = (option("microbatches", 1),) if plan.request.microbatches > 1 else ()
        yield Fixable(draft=Draft(finding=finding, candidates=candidates), holds=lambda _: True)


def _runs(found: list[CompiledCollective]) -> int:
    return sum(one.count_per_step for one in found)
