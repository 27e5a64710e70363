"""What this engine does not run yet, said before anything is allocated."""

from __future__ import annotations

from shardwright.core.errors import InputError
from shardwright.core.plan import Plan


def require_support(plan: Plan) -> None:
    """Raises InputError for a plan that this engine does not lower, with what to use in its place."""
    layout, mesh = plan.request.layout, plan.mesh
    stages = [a for a in mesh.names if mesh.size(a) > 1 and "stage" in layout.entries[a].roles.values()]
    if stages:
        raise InputError(
            f"layout '{layout.name}': pipeline stages ('{stages[0]}', size {mesh.size(stages[0])}) can be planned and "
            f"not yet trained. Give the axis size 1, or another layout: fsdp, fsdp-tp."
        )
