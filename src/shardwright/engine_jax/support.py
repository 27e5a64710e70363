"""What this engine does not run yet, said before anything is allocated."""

from __future__ import annotations

from shardwright.core.errors import InputError
from shardwright.core.plan import Plan


def require_support(plan: Plan) -> None:
    """Raises InputError for a plan of other movements than this engine lowers, with what to use in their place."""
    layout, mesh = plan.request.layout, plan.mesh
    components = plan.request.table.components
    stages = [a for a in mesh.names if mesh.size(a) > 1 and "stage" in layout.entries[a].roles.values()]
    if stages:
        raise InputError(
            f"layout '{layout.name}': pipeline stages ('{stages[0]}', size {mesh.size(stages[0])}) can be planned and "
            f"not yet trained. Give the axis size 1, or another layout: fsdp, fsdp-tp."
        )
    if layout.move_attention != "gather" and mesh.size(layout.axes_that_cut("length", "attention")) > 1:
        raise InputError(
            f"move.attention '{layout.move_attention}' can be planned and not yet trained. Use --move attention=gather."
        )
    experts = mesh.larger_than_one(layout.axes_with("expert", "moe")) if "moe" in components else ()
    if experts and layout.move_moe != "all-to-all":
        raise InputError(f"move.moe '{layout.move_moe}' can be planned and not yet trained. Use --move moe=all-to-all.")
