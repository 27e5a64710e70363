"""SW122: `keep_gathered` where no weight would be gathered a second time."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import product
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import weight_reshardings


def kept_for_nothing(plan: Plan) -> Iterator[Draft]:
    """Information for an axis over which no weight of a layer is gathered, and where nothing is recomputed."""
    request, mesh = plan.request, plan.mesh
    axes = [axis for axis in mesh.larger_than_one(mesh.names) if request.layout.entries[axis].keep_gathered]
    if not axes:
        return
    uses = [use for row in plan.weights for use in weight_reshardings(request, mesh, row).values() if use.kept]
    over = {axis for use in uses for axis in use.at_rest.axes if axis not in use.gathered.axes}
    for axis in axes:
        if axis in over and request.remat != "none":
            continue
        nothing = "--remat none: no layer is recomputed, and each weight is gathered once in any case"
        finding = Finding(
            code="SW122",
            severity="info",
            where=f"option 'keep_gathered' of axis '{axis}'",
            position=request.layout.entries[axis].position,
            found=nothing if axis in over else f"{product(mesh, [axis])} gathers no weight of a layer",
            needed="layers that are recomputed, with weights that are gathered over the axis",
        )
        yield Draft(finding=finding, candidates=(entry(plan, axis, keep_gathered=None),))
