"""SW107: several matrices in one dim of a user's weight, as q, k and v in ``qkv``, which a layout would shard as if they were one."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from shardwright.core.checks.edits import resized
from shardwright.core.checks.tensors import weight_rows
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import EXCHANGED_FOR_HEADS
from shardwright.core.layout.wording import others, product
from shardwright.core.mesh.notation import place_in
from shardwright.core.model.table import Weight
from shardwright.core.plan.plan import Plan, TensorPlan

Group = tuple[str, tuple[str, ...], str, int, int]
"""A logical axis, the axes that shard it, the spec in use, the dim's size, and that of the weight beside it."""


def fused_matrices(plan: Plan) -> Iterator[Draft]:
    """A dim of heads that axes shard in use, and whose logical axis is shorter in the weight that the module has beside it, as in
    its output projection. A weight of one dim, as a bias, is not compared."""
    if plan.request.table.owner != "users":
        return
    rows = [(tensor, weight) for tensor, weight in weight_rows(plan) if len(weight.shape) > 1]
    by_heads = plan.request.properties.divides_by_heads
    groups: dict[Group, list[tuple[TensorPlan, Weight]]] = {}
    for tensor, weight in rows:
        if _path(weight)[-1] in by_heads:
            continue
        for name in [axis for axis in weight.logical_axes if axis in EXCHANGED_FOR_HEADS]:
            axes = plan.mesh.larger_than_one(tensor.in_use.axes_of(name))
            beside = _beside(weight, name, [other for _, other in rows]) if axes else None
            if beside is not None:
                key = (name, axes, str(tensor.in_use), weight.size(name), beside.size(name))
                groups.setdefault(key, []).append((tensor, beside))
    for (name, axes, _, size, _), fused in groups.items():
        yield _fused(plan, name, axes, size, fused)


def _beside(weight: Weight, name: str, others: Sequence[Weight]) -> Weight | None:
    """The weight with a shorter dim of this name, of those nearest in the tree of names; None if one of them has an equal dim."""
    path = _path(weight)
    near = [other for other in others if other.name != weight.name and name in other.logical_axes]
    common = {other.name: _common(path, _path(other)) for other in near}
    nearest = [other for other in near if common[other.name] == max(common.values())]
    if any(other.size(name) >= weight.size(name) for other in nearest):
        return None
    return nearest[0] if nearest else None


def _path(weight: Weight) -> list[str]:
    return re.split(r"[./]", weight.name)


def _common(path: Sequence[str], other: Sequence[str]) -> int:
    pairs = zip(path, other, strict=False)
    return next((number for number, (a, b) in enumerate(pairs) if a != b), min(len(path), len(other)))


def _fused(
    plan: Plan, name: str, axes: tuple[str, ...], size: int, fused: Sequence[tuple[TensorPlan, Weight]]
) -> Draft:
    (tensor, beside), *rest = fused
    number, shards = tensor.in_use.logical_axes.index(name), plan.mesh.size(axes)
    also = f"; {others([one.name for one, _ in fused], tensor.kind)}" if rest else ""
    finding = Finding(
        code="SW107",
        severity="warning",
        tensor=tensor.name,
        where=f"dim {number} ('{name}') of {tensor.name}",
        notation=str(tensor.in_use),
        mark=place_in(tensor.in_use, number),
        found=f"{size} along '{name}', and {beside.size(name)} in {beside.name} beside it: several matrices in one dim, as q, k and v. Over "
        f"{product(plan.mesh, axes)} a device has {size // shards} in a row, of the first matrix before the second{also}",
        needed="its part of each matrix on each device: each as a weight of its own, or a dim of its own for them, as "
        f"'{tensor.component}: _matrices {' '.join(tensor.in_use.logical_axes)}'",
        cost="its results are moved between devices in each layer",
    )
    return Draft(
        finding=finding, candidates=tuple(candidate for axis in reversed(axes) for candidate in resized(plan, axis, 1))
    )
