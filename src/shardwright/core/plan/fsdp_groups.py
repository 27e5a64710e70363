"""Which weights PyTorch gathers together: the groups that ``fully_shard`` makes one gather and one reduce-scatter of.

One group holds what one layer (or the ends of the model) has of the same axes and dtype. What ``fully_shard`` sums over
replicas is what all of a group sum over; the rest of a weight's replicas is summed behind the last microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import name_in_layer
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.core.resolution.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOfLayer:
    """One parameter: a weight of the table, of one layer where layers share the row.

    ``key``: its name in the engine, ``layers.3.attention.q``; ``layer``: its number in the ``stack``. ``at_rest``: of one layer, as PyTorch stores it. ``cut``:
    what cuts it in use. ``gathered``: the axes that only store it, mesh order. ``summed``: those over which its gradient
    is summed and not cut. ``alike``: those of ``gathered`` whose devices all make the same gradient. ``gathered_in``: the
    dtype that travels; ``summed_in``: that of parts of its gradient. ``num_uses``: 2 for a tied one.
    """

    key: str
    stack: str | None
    weight: str
    layer: int | None
    component: str
    shape: tuple[int, ...]
    at_rest: Spec
    in_use: Spec
    gathered: tuple[str, ...]
    all_reduced: tuple[str, ...]
    replicated_gradient: tuple[str, ...]
    dtype: str
    gather_dtype: str
    reduce_dtype: str
    num_uses: int

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """What a rank keeps, in the stored dims; None where it keeps nothing."""
        return shard_box(self.at_rest, mesh, self.shape, rank, "nested")

    def shard_elements(self, mesh: Mesh) -> int:
        """Elements of the largest part at rest: dim 0 is padded until its axes divide it."""
        sizes = [size // mesh.size(dim.axes) for size, dim in zip(self.shape, self.in_use.dims, strict=True)]
        # A user's own weight may have no dim.
        first, *others = sizes or [1]
        return ceil(first / mesh.size(self.gathered)) * prod(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroup:
    """Weights that are gathered together: over ``axes``, and their gradients summed over ``replicas`` too."""

    weights: tuple[WeightOfLayer, ...]
    axes: tuple[str, ...]
    replicas: tuple[str, ...]

    def other_replicas(self, one: WeightOfLayer) -> tuple[str, ...]:
        """The axes that a weight's gradient is summed over behind the last microbatch."""
        return tuple(axis for axis in one.all_reduced if axis not in self.replicas)

    def shard_elements(self, mesh: Mesh) -> int:
        """Elements that a device has of all of them at rest, padding too."""
        return sum(one.shard_elements(mesh) for one in self.weights)


def weights_of(plan: Plan) -> tuple[WeightOfLayer, ...]:
    """Every trained parameter of a plan, the table's order, layer by layer within a row."""
    return tuple(
        weight_of_layer(plan.request, plan.mesh, row, layer)
        for row in trained(plan.request, plan.weights)
        for layer in (range(row.num) if row.stack is not None else (None,))
    )


def trained(request: Request, weights: Iterable[TensorPlan]) -> Iterator[TensorPlan]:
    """The rows of weights that have a gradient."""
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    return (row for row in weights if row.name not in frozen)


def weight_of_layer(request: Request, mesh: Mesh, row: TensorPlan, layer: int | None) -> WeightOfLayer:
    """The parameter of one layer; ``layer`` None where the row is not of a stack."""
    way = weight_reshardings(request, mesh, row)[row.component]
    leaves = [axis for axis in way.at_rest.axes if axis not in way.gathered.axes]
    summed = mesh.larger_than_one(axis for axis, kind in row.gradient.items() if kind == "all-reduce")
    return WeightOfLayer(
        key=row.name if layer is None else f"{row.stack}.{layer}.{name_in_layer(row.name, row.stack)}",
        stack=row.stack,
        weight=row.name,
        layer=layer,
        component=row.component,
        shape=row.shape,
        at_rest=way.at_rest,
        in_use=way.gathered,
        gathered=mesh.larger_than_one(mesh.in_mesh_order(leaves)),
        all_reduced=mesh.in_mesh_order(summed),
        replicated_gradient=mesh.in_mesh_order(axis for axis in way.replicated_gradient if axis in leaves),
        dtype=row.dtype,
        gather_dtype=way.gather_dtype,
        reduce_dtype=way.reduce_dtype,
        num_uses=1 + len(request.table.weight(row.name).uses),
    )


def groups_of(weights: Iterable[WeightOfLayer]) -> tuple[FsdpGroup, ...]:
    """The groups of one layer's weights, those of the most bytes first."""
    found: dict[tuple, list[WeightOfLayer]] = {}
    for one in weights:
        found.setdefault((one.gathered, one.gather_dtype if one.gathered else "", one.dtype), []).append(one)
    groups = []
    for (axes, _, _), members in found.items():
        shared = [axis for axis in members[0].all_reduced if all(axis in other.all_reduced for other in members)]
        groups.append(FsdpGroup(weights=tuple(members), axes=axes, replicas=tuple(shared) if axes else ()))
    return tuple(sorted(groups, key=lambda group: (not group.axes, -sum(prod(one.shape) for one in group.weights))))


def component_of(weights: Sequence[WeightOfLayer], mesh: Mesh) -> str:
    """The component that has the most of what travels together; the first of several that have as much."""
    held: dict[str, int] = {}
    for one in weights:
        held[one.component] = held.get(one.component, 0) + one.shard_elements(mesh)
    return max(held, key=held.__getitem__)
