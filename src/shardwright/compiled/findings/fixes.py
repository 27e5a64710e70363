"""Chooses the fix to print: the first edit whose plan is valid and meets the condition of the finding, and on a machine is not called worse
by the plan (``cost/advice.py``).

Nothing is compiled again: a fix is checked on the plan only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shardwright.core.checks import drafts
from shardwright.core.checks.edits import moe_move
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.cost.advice import Settle


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixable:
    """A finding with the edits that may fix it. ``holds``: whether a changed plan meets the condition of the finding."""

    draft: Draft
    holds: Callable[[Plan], bool]


def settled(plan: Plan, fixable: Fixable, settle: Settle) -> Finding:
    """The finding with its fix. ``settle``: chooses among those that end it."""
    draft = fixable.draft
    if not draft.candidates:
        return draft.finding
    known = _errors(plan)

    def ends(candidate: Candidate) -> bool:
        try:
            changed = resolve(candidate.edit(plan.request))
        except FindingsError:
            return False
        return fixable.holds(changed) and _errors(changed) <= known

    return settle(draft, ends)


def moe_moves(plan: Plan, options: Iterable[str]) -> tuple[Candidate, ...]:
    """The given options of ``move: {moe: ...}`` other than the plan's, as edits: ``move: {moe: ring}``."""

    return tuple(moe_move(option) for option in options if option != plan.request.layout.move_moe)


def _errors(plan: Plan) -> set[object]:
    return {draft.key for draft in drafts(plan) if draft.finding.severity == "error"}
