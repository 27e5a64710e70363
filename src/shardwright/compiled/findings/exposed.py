"""SW309: collectives that do not overlap with a product."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import total
from shardwright.compiled.findings.wording import cost_of_all, place, several_times
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import percent
from shardwright.core.plan.plan import Plan

SHOWN = 3


def exposed(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """One finding with the largest exposed collectives; none if the text does not show overlap."""
    del agreement
    waiting = [one for one in program.collectives if one.overlapped is False]
    if not waiting:
        return
    largest = sorted(waiting, key=lambda one: -total([one]))[:SHOWN]
    lines = "".join(
        f"\n{place(one.component, one.kind, one.axes)}, {several_times(total([one]), one.count_per_step)}"
        for one in largest
    )
    yield Finding(
        code="SW309",
        severity="info",
        where=f"a step of {plan.request.table.name} under layout '{plan.request.layout.name}'",
        found=f"{percent(total(waiting) / total(program.collectives))} of the bytes of its collectives are exposed; "
        f"the largest:{lines}",
        needed="nothing; a product between the start and the done of a collective would hide it",
        cost=cost_of_all(plan, waiting, "exposed"),
    )
