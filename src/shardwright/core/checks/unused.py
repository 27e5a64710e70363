"""SW111: names in a layout that no tensor of this model has."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry, without_rule
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import ROLES
from shardwright.core.layout.wording import either
from shardwright.core.plan.plan import Plan


def unused(plan: Plan) -> Iterator[Draft]:
    """Rules, and names of an entry's `weights:`, for dims that no weight of the model has as the engine stores it.

    A dim that is merged with another (PyTorch's heads) is not sharded alone, so a rule without an axis for it holds.
    """
    layout, table = plan.request.layout, plan.request.table
    present: dict[str, dict[str, None]] = {}
    for tensor in plan.weights:
        present.setdefault(tensor.component, {}).update(dict.fromkeys(tensor.spec.logical_axes[-len(tensor.shape) :]))
    for rule in layout.rules:
        known = tuple(present.get(rule.component, ()))
        merged = any(rule.component == w.component and rule.logical_axis in w.logical_axes for w in table.weights)
        if rule.logical_axis not in known and (rule.axes or not merged):
            yield Draft(
                finding=Finding(
                    code="SW111",
                    # A layout may be for several models: a component that this model lacks is no error in the rule.
                    severity="error" if known else "warning",
                    where=f"rule for '{rule.logical_axis}' in '{rule.component}'",
                    position=rule.position,
                    found=f"no weight of {table.name} in '{rule.component}' has a dim '{rule.logical_axis}'",
                    needed=f"one of {', '.join(known)}" if known else f"a model with weights in '{rule.component}'",
                ),
                candidates=(without_rule(rule.component, rule.logical_axis),),
            )
    for axis, declared in layout.entries.items():
        if not isinstance(declared.weights, tuple):
            continue
        stored_in = [c for c, role in declared.roles.items() if ROLES[role].stores and c in present]
        known = {name for component in stored_in for name in present[component]}
        unknown = tuple(name for name in declared.weights if name not in known)
        if unknown:
            left = tuple(name for name in declared.weights if name in known)
            yield Draft(
                finding=Finding(
                    code="SW111",
                    severity="warning",
                    where=f"option 'weights' of '{axis}'",
                    position=declared.position,
                    found=f"no weight of {table.name} that '{axis}' stores has a dim {either(repr(n) for n in unknown)}",
                    needed="logical axes of weights that the axis stores",
                ),
                candidates=(entry(plan, axis, weights=left or None),),
            )
