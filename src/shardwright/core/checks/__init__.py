"""Checks of a whole plan. Each file holds one group; each check is a generator of drafts.

A draft names what might mend it. ``check`` prints the first candidate that does: it plans the changed request, runs
the checks again, and takes it when the finding is gone and no error is new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.core.checks.choices import choices
from shardwright.core.checks.idle import idle_axes
from shardwright.core.checks.memory import memory
from shardwright.core.checks.pays import pays
from shardwright.core.checks.replicas import whole_activations, whole_weights
from shardwright.core.checks.rows import rows_and_tokens
from shardwright.core.checks.stages import stages
from shardwright.core.checks.storage import another_dim, too_small
from shardwright.core.checks.strides import strides
from shardwright.core.checks.two_dims import two_dims
from shardwright.core.checks.units import padded, whole_units
from shardwright.core.checks.unused import unused
from shardwright.core.draft import Candidate, Draft, Key
from shardwright.core.errors import FindingsError
from shardwright.core.finding import Finding, worst_first
from shardwright.core.plan import Plan
from shardwright.core.request import Request

CHECKS: tuple[Callable[[Plan], Iterator[Draft]], ...] = (
    whole_weights,
    whole_activations,
    two_dims,
    idle_axes,
    padded,
    choices,
    whole_units,
    rows_and_tokens,
    stages,
    unused,
    too_small,
    strides,
    another_dim,
    pays,
    memory,
)


def drafts(plan: Plan) -> tuple[Draft, ...]:
    """Every finding about a plan, before its fix is chosen."""
    return tuple(draft for one in CHECKS for draft in one(plan))


def check(plan: Plan, resolve: Callable[[Request], Plan]) -> tuple[Finding, ...]:
    """Every finding about a plan, errors first; ``resolve`` plans a changed request, to try a fix."""
    found = drafts(plan)
    errors = {draft.key for draft in found if draft.finding.severity == "error"}
    tried: dict[str, dict[Key, Draft] | None] = {}

    def holds(draft: Draft, candidate: Candidate) -> bool:
        if candidate.text not in tried:
            tried[candidate.text] = _after(candidate, plan, resolve)
        after = tried[candidate.text]
        if after is None or draft.key in after:
            return False
        return all(key in errors for key, one in after.items() if one.finding.severity == "error")

    return worst_first(draft.settled(lambda candidate, d=draft: holds(d, candidate)) for draft in found)


def _after(candidate: Candidate, plan: Plan, resolve: Callable[[Request], Plan]) -> dict[Key, Draft] | None:
    """The drafts of the changed request; None where there can be no plan of it."""
    try:
        changed = resolve(candidate.edit(plan.request))
    except FindingsError:
        return None
    return {draft.key: draft for draft in drafts(changed)}
