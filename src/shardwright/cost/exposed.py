"""SW206: a step that waits for its communication, with the first change that would make it shorter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shardwright.core.checks import drafts
from shardwright.core.checks.edits import both, option, resized
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import EXPOSED_WARNING_SHARE
from shardwright.core.layout.wording import every, percent
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.cost.advice import Settle
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.stages import with_unit_costs
from shardwright.cost.wording import seconds_text

FEWER = 2
"""Smaller numbers of microbatches, and other sizes of an axis, that are tried."""


def exposed(plan: Plan, machine: Machine, settle: Settle, elsewhere: Sequence[Candidate] = ()) -> Iterator[Finding]:
    """One finding where what is not hidden is more than the threshold's share of the step. A plan that has errors has those first."""
    step = plan.step
    if step is None or plan.errors or step.exposed_seconds <= EXPOSED_WARNING_SHARE.value * step.seconds:
        return
    finding = Finding(
        code="SW206",
        severity="warning",
        where=f"a step of {plan.request.table.name} under layout '{plan.request.layout.name}'",
        found=f"{seconds_text(step.exposed_seconds)} of {seconds_text(step.seconds)} are communication that is not hidden, "
        f"{percent(step.exposed_seconds / step.seconds)}; the longest: {_longest(plan)}",
        needed=f"at most {percent(EXPOSED_WARNING_SHARE.value)} of a step",
    )
    yield settle(
        Draft(finding=finding, candidates=tuple(_changes(plan, elsewhere))), lambda one: _is_valid(one, plan, machine)
    )


def _longest(plan: Plan) -> str:
    assert plan.answer is not None
    assert plan.answer.speed is not None
    waiting = plan.answer.speed.waiting
    assert waiting is not None
    return f"{waiting.kind} over {every(waiting.axes)} in '{waiting.component}', {seconds_text(waiting.seconds)} a step"


def _changes(plan: Plan, elsewhere: Sequence[Candidate]) -> Iterator[Candidate]:
    """Fewer microbatches, other sizes of the axes that do not shard rows, other layouts, then more rows."""
    request, mesh = plan.request, plan.mesh
    fewer = [number for number in reversed(divisors(request.microbatches)) if number < request.microbatches]
    for number in fewer[:FEWER]:
        yield option("microbatches", number)
    for axis in mesh.larger_than_one(mesh.names):
        if request.layout.entries[axis].elsewhere != "fsdp" or request.layout.entries[axis].declared:
            smaller = [size for size in reversed(divisors(mesh.size(axis))) if size < mesh.size(axis)]
            for size in smaller[:FEWER]:
                yield from resized(plan, axis, size)
    yield from elsewhere
    yield option("batch", 2 * request.batch)
    yield both(option("batch", 4 * request.batch), option("microbatches", 2 * request.microbatches))


def _is_valid(candidate: Candidate, plan: Plan, machine: Machine) -> bool:
    """Whether the change has a plan on the machine without an error."""
    try:
        changed = resolve(with_unit_costs(candidate.edit(plan.request), machine), collectives=False)
    except (FindingsError, InputError):
        return False
    return changed.mesh.num_devices == machine.num_devices and not any(
        draft.finding.severity == "error" for draft in drafts(changed)
    )
