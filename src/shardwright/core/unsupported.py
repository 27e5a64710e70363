"""What no engine runs yet, though it can be planned: said before anything is allocated."""

from __future__ import annotations

from shardwright.core.errors import InputError
from shardwright.core.plan import Plan
from shardwright.core.roles import ROLES


def require_no_stages(plan: Plan) -> None:
    """Raises InputError for pipeline stages."""
    layout, mesh = plan.request.layout, plan.mesh
    stages = [a for a in mesh.names if mesh.size(a) > 1 and "stage" in layout.entries[a].roles.values()]
    if stages:
        raise InputError(
            f"layout '{layout.name}': pipeline stages ('{stages[0]}', size {mesh.size(stages[0])}) can be planned and "
            f"not yet trained. Give the axis size 1, or another layout: fsdp, fsdp-tp."
        )


def require_slices(plan: Plan) -> None:
    """Raises InputError for a rule that leaves whole what a device takes no slice of.

    It takes one of what a rule leaves whole; that is none where only minor axes cut the rest.
    """
    layout, mesh = plan.request.layout, plan.mesh
    for rule in layout.rules:
        name = rule.logical_axis
        cutting = mesh.larger_than_one(
            axis for axis in mesh.names if name in ROLES[layout.role(axis, rule.component)].weights
        )
        kept = tuple(axis for axis in cutting if axis in rule.axes)
        if kept != cutting[: len(kept)]:
            first = next(axis for axis in cutting if axis not in rule.axes)
            raise InputError(
                f"layout '{layout.name}': the rule for '{name}' in '{rule.component}' keeps '{kept[-1]}' and leaves out "
                f"'{first}', which stands before it in the mesh. A device's heads, hidden units or vocabulary entries "
                f"are then no part of what it holds. Leave out '{kept[-1]}' too, or it alone."
            )
