"""SW117: a mesh order under which the rows or tokens of neighbouring devices are not adjacent."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.boxes.placements import StridedShard, placements_of
from shardwright.core.checks.edits import mesh_order
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import EXCHANGED_FOR_HEADS
from shardwright.core.layout.wording import every, others
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan, TensorPlan

NOUNS = {"batch": "rows", "length": "tokens"}
NO_NEIGHBOURS = ("q_length", *EXCHANGED_FOR_HEADS)
"""Queries are sharded as the length is, which is reported already. Heads have no neighbours."""


def strides(plan: Plan) -> Iterator[Draft]:
    """Each dim of activations on which the axes have another order than in the mesh, once."""
    groups: dict[tuple[str, tuple[str, ...]], list[TensorPlan]] = {}
    for tensor in plan.activations:
        for dim in tensor.in_use.dims:
            if dim.logical_axis in NO_NEIGHBOURS:
                continue
            axes = plan.mesh.larger_than_one(dim.axes)
            if axes != plan.mesh.in_mesh_order(axes):
                groups.setdefault((dim.logical_axis, axes), []).append(tensor)
    for (name, axes), tensors in groups.items():
        yield _draft(plan, name, axes, tensors)


def _draft(plan: Plan, name: str, axes: tuple[str, ...], tensors: list[TensorPlan]) -> Draft:
    tensor = tensors[0]
    spec = tensor.in_use
    number = spec.logical_axes.index(name)
    placed = dict(zip(plan.mesh.names, placements_of(spec, plan.mesh), strict=True))
    strided = [f"{axis} {placed[axis]}" for axis in axes if isinstance(placed[axis], StridedShard)]
    finding = Finding(
        code="SW117",
        severity="warning",
        tensor=tensor.name,
        where=f"'{name}' of {tensor.name}",
        position=plan.request.layout.mesh[axes[0]].position,
        notation=str(spec),
        mark=place_in(spec, number),
        found=f"{every(axes)} shard '{name}' in this order, since the later ones do not shard it in every component; "
        f"the mesh has {every(plan.mesh.in_mesh_order(axes))}",
        needed=f"a mesh with {every(axes)} in this order",
        cost=f"neighbours in the mesh hold {NOUNS.get(name, name)} that are not adjacent, strided shards in PyTorch's terms "
        f"({', '.join(strided)}): {others([t.name for t in tensors], 'activation')}",
    )
    return Draft(finding=finding, candidates=(mesh_order(plan, _reordered(plan, axes)),))


def _reordered(plan: Plan, axes: tuple[str, ...]) -> list[str]:
    """The axes of the mesh with the given ones in their order on the dim. Every other axis keeps its place."""
    wanted = iter(axes)
    return [next(wanted) if axis in axes else axis for axis in plan.mesh.names]
