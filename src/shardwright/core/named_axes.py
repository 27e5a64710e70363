"""The sets of axes that a loader, a loss and a wrapper of weights ask for, by the names that they have in other programs."""

from __future__ import annotations

from collections.abc import Mapping

from shardwright.core.plan.plan import Plan


def named_axes(plan: Plan) -> Mapping[str, tuple[str, ...]]:
    """Axes of the plan's mesh by name, in mesh order.

    | name | the ranks along it |
    |---|---|
    | ``dp``, ``batch`` | have different rows: the axes that a loader divides a batch over |
    | ``loss`` | have different tokens: the axes that a loss and its count are summed over |
    | ``dp_shard_cp`` | have different tokens, and shards of weights that are gathered for use |
    """
    stored = {
        axis
        for row in plan.weights
        if row.at_rest is not None
        for axis in row.at_rest.axes
        if axis not in row.in_use.axes
    }
    rows = plan.mesh.in_mesh_order(plan.dp)
    return {
        "dp": rows,
        "batch": rows,
        "loss": plan.loss_axes,
        "dp_shard_cp": tuple(axis for axis in plan.loss_axes if axis in stored),
    }
