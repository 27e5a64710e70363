"""What a MaxText configuration decides silently, as findings with file and line.

drafted.py         a finding before its fix is chosen, and edits of rules
replicated.py      SW101, SW103: what an axis does not shard
guard.py           SW101 past MaxText's own guard
axis_conflicts.py  SW102: one axis on two dims
dispatch.py        SW102 at the dispatch of tokens
divisibility.py    SW107, SW108: dims that their axes do not divide
names.py           SW111: names and axes that do not exist
evaluation.py      SW111: rules of evaluation on the training mesh
order.py           SW112: results that depend on the order of rules
keys.py            SW111, SW123: keys that MaxText does not know, and those that no plan of ours carries over
sources.py         SW112: values that another source replaces
dialect.py         SW113: weights that Flax's dialects shard differently

Each check is a generator over one imported configuration. A fix is resolved and checked before it is printed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.core.findings.finding import Finding
from shardwright.interop.maxtext.checks.axis_conflicts import axis_lost, axis_twice
from shardwright.interop.maxtext.checks.dialect import dialects_differ
from shardwright.interop.maxtext.checks.dispatch import dispatched_by_batch
from shardwright.interop.maxtext.checks.divisibility import dims_indivisible, rows_indivisible
from shardwright.interop.maxtext.checks.drafted import Drafted, Remedy
from shardwright.interop.maxtext.checks.evaluation import evaluated_elsewhere
from shardwright.interop.maxtext.checks.guard import guard_lets_through
from shardwright.interop.maxtext.checks.keys import keys_unknown, steps_otherwise
from shardwright.interop.maxtext.checks.names import axes_absent, names_unknown, names_without_a_rule, rules_unused
from shardwright.interop.maxtext.checks.order import free_axes_dropped, moved_when_restated, order_decides, unreachable
from shardwright.interop.maxtext.checks.replicated import idle_in_experts, replicated_activations, replicated_weights
from shardwright.interop.maxtext.checks.sources import (
    context_axis_disagrees,
    context_axis_unknown,
    rules_hidden,
    rules_overridden,
)
from shardwright.interop.maxtext.resolution.placement import Imported

CHECKS: tuple[Callable[[Imported], Iterator[Drafted]], ...] = (
    names_unknown,
    axes_absent,
    names_without_a_rule,
    rules_unused,
    dispatched_by_batch,
    axis_lost,
    axis_twice,
    free_axes_dropped,
    moved_when_restated,
    order_decides,
    unreachable,
    rules_hidden,
    rules_overridden,
    context_axis_disagrees,
    context_axis_unknown,
    keys_unknown,
    steps_otherwise,
    evaluated_elsewhere,
    dialects_differ,
    replicated_weights,
    guard_lets_through,
    replicated_activations,
    idle_in_experts,
    dims_indivisible,
    rows_indivisible,
)


def check(imported: Imported) -> tuple[Finding, ...]:
    """All findings on a configuration."""
    drafts = _drafts(imported)
    known = {draft.key for draft in drafts if draft.finding.severity == "error"}

    def mends(draft: Drafted, remedy: Remedy) -> bool:
        after = _drafts(remedy.edit(imported))
        errors = {other.key for other in after if other.finding.severity == "error"}
        return draft.key not in {other.key for other in after} and errors <= known

    return tuple(draft.settled(lambda remedy, d=draft: mends(d, remedy)) for draft in drafts)


def _drafts(imported: Imported) -> list[Drafted]:
    return [draft for each in CHECKS for draft in each(imported)]
