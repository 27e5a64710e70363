"""SW122: tokens in two hops where fewer than two axes shard the experts."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import moe_move
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import product
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.resolve import expert_axes
from shardwright.core.resolution.token_hops import TWO_HOPS, in_two_hops


def hops_of_one_axis(plan: Plan) -> Iterator[Draft]:
    """One draft where a layout asks for two hops, and tokens take one, or none."""
    request, layout = plan.request, plan.request.layout
    if layout.move_moe != TWO_HOPS or in_two_hops(request, plan.mesh) or request.table.top_k is None:
        return
    axes = expert_axes(layout, plan.mesh)
    found = f"{product(plan.mesh, axes)} alone shards experts" if axes else "no axis larger than 1 shards experts"
    finding = Finding(
        code="SW122",
        severity="info",
        where=f"move.moe of layout '{layout.name}'",
        position=layout.positions.get("move"),
        found=f"{found}: tokens go to them in {'one hop' if axes else 'no hop'}",
        needed="two axes with role 'expert' in 'moe': the first counts nodes, the others the devices of a node",
    )
    yield Draft(finding=finding, candidates=(moe_move("all-to-all"),))
