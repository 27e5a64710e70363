"""FSDP parameter groups: the weights that ``fully_shard`` gathers in one all-gather and reduces in one reduce-scatter.

A group has the weights of one layer (or of the ends of the model) with the same gathered axes and dtype. ``fully_shard``
all-reduces a group's gradients over the replica axes that all its weights share. The gradients are all-reduced over a
weight's other replica axes after the last microbatch.
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
from shardwright.core.quantization.products import quantized_layers
from shardwright.core.resolution.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOfLayer:
    """One parameter: a weight of the table, or one layer of it where several layers share the row.

    ``key``: its name in the engine, ``layers.3.attention.q``. ``layer``: its number in the ``stack``. ``shape``: in memory,
    ``saved_shape``: without the padding of a vocabulary. ``at_rest``: the spec
    of one layer, as PyTorch stores it. ``in_use``: the spec after the gather. ``gathered``: the gathered axes, mesh order.
    ``all_reduced``: the axes over which its gradient is all-reduced. ``replicated_gradient``: the gathered axes over
    which every device computes the same gradient. ``gather_dtype``, ``reduce_dtype``: the dtypes of its all-gather and of
    the reduction of its gradient. ``num_uses``: 2 for a tied weight. ``of_codes``: whether codes and scales are gathered.
    """

    key: str
    stack: str | None
    weight: str
    layer: int | None
    component: str
    shape: tuple[int, ...]
    saved_shape: tuple[int, ...]
    at_rest: Spec
    in_use: Spec
    gathered: tuple[str, ...]
    all_reduced: tuple[str, ...]
    replicated_gradient: tuple[str, ...]
    dtype: str
    gather_dtype: str
    reduce_dtype: str
    num_uses: int
    of_codes: bool = False

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """The shard of a rank at rest, in the stored dims; None where the rank has none. ``fully_shard`` shards what a rank
        has in use over the product of the gathered axes."""
        return shard_box(self.at_rest, mesh, self.shape, rank, in_turn=self.in_use.axes)

    def saved_box(self, mesh: Mesh, rank: int) -> Box | None:
        """The part of the shard that a checkpoint has; None where the rank has none, or padding only."""
        box = self.box(mesh, rank)
        return box and box.intersect(Box.whole(self.saved_shape))

    def shard_elements(self, mesh: Mesh) -> int:
        """Elements of the largest shard at rest. Dim 0 is padded until its axes divide it."""
        sizes = [size // mesh.size(dim.axes) for size, dim in zip(self.shape, self.in_use.dims, strict=True)]
        # A weight of a user's own model may have no dim.
        first, *others = sizes or [1]
        return ceil(first / mesh.size(self.gathered)) * prod(others)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroup:
    """Weights with one all-gather and one reduce-scatter over ``axes``; their gradients are all-reduced over ``replicas``.

    ``of_codes``: codes and scales are gathered, by the engine itself; ``fully_shard`` gathers the other groups.
    """

    weights: tuple[WeightOfLayer, ...]
    axes: tuple[str, ...]
    replicas: tuple[str, ...]

    @property
    def of_codes(self) -> bool:
        return self.weights[0].of_codes

    def other_replicas(self, one: WeightOfLayer) -> tuple[str, ...]:
        """The axes over which a weight's gradient is all-reduced after the last microbatch, apart from the group."""
        return tuple(axis for axis in one.all_reduced if axis not in self.replicas)

    def shard_elements(self, mesh: Mesh) -> int:
        """Elements of a device's shards of the group at rest, with padding."""
        return sum(one.shard_elements(mesh) for one in self.weights)


def weights_of(plan: Plan) -> tuple[WeightOfLayer, ...]:
    """Every trained parameter of a plan, in the table's order, layer by layer within a row."""
    return tuple(weights_of_rows(plan, plan.weights))


def weights_of_rows(plan: Plan, rows: Iterable[TensorPlan]) -> Iterator[WeightOfLayer]:
    """The same of some rows."""
    for row in trained(plan.request, rows):
        for layer in plan.request.table.weight(row.name).layers if row.stack is not None else (None,):
            yield weight_of_layer(plan.request, plan.mesh, row, layer)


def trained(request: Request, weights: Iterable[TensorPlan]) -> Iterator[TensorPlan]:
    """The rows of weights that have a gradient."""
    frozen = {weight.name for weight in request.table.weights if weight.frozen}
    return (row for row in weights if row.name not in frozen)


def weight_of_layer(request: Request, mesh: Mesh, row: TensorPlan, layer: int | None) -> WeightOfLayer:
    """The parameter of one layer, by its number in the stack; ``layer`` is None where the row is not of a stack."""
    weight = request.table.weight(row.name)
    use = weight_reshardings(request, mesh, row)[row.component]
    gathered = [axis for axis in use.at_rest.axes if axis not in use.gathered.axes]
    summed = mesh.larger_than_one(axis for axis, kind in row.gradient.items() if kind == "all-reduce")
    recipe, quantized = request.precision, 0
    if recipe is not None and recipe.gather_quantized and mesh.larger_than_one(gathered):
        quantized = quantized_layers(weight, recipe, request.table)
    return WeightOfLayer(
        key=row.name if layer is None else f"{row.stack}.{layer}.{name_in_layer(row.name, row.stack)}",
        stack=row.stack,
        weight=row.name,
        layer=layer,
        component=row.component,
        shape=row.shape,
        saved_shape=row.saved_shape,
        at_rest=use.at_rest,
        in_use=use.gathered,
        gathered=mesh.larger_than_one(mesh.in_mesh_order(gathered)),
        all_reduced=mesh.in_mesh_order(summed),
        replicated_gradient=mesh.in_mesh_order(axis for axis in use.replicated_gradient if axis in gathered),
        dtype=row.dtype,
        gather_dtype=use.gather_dtype,
        reduce_dtype=use.reduce_dtype,
        num_uses=1 + len(weight.uses),
        of_codes=(0 if layer is None else layer - weight.first_in_stack) < quantized,
    )


def groups_of(weights: Iterable[WeightOfLayer]) -> tuple[FsdpGroup, ...]:
    """The groups of one layer's weights, the largest first; weights that are not gathered come last."""
    found: dict[tuple, list[WeightOfLayer]] = {}
    for one in weights:
        key = (one.gathered, one.gather_dtype if one.gathered else "", one.dtype, one.of_codes)
        found.setdefault(key, []).append(one)
    groups = []
    for (axes, _, _, of_codes), members in found.items():
        shared = [axis for axis in members[0].all_reduced if all(axis in other.all_reduced for other in members)]
        by_fully_shard = bool(axes) and not of_codes
        groups.append(FsdpGroup(weights=tuple(members), axes=axes, replicas=tuple(shared) if by_fully_shard else ()))
    return tuple(sorted(groups, key=lambda group: (not group.axes, -sum(prod(one.shape) for one in group.weights))))


def component_of(weights: Sequence[WeightOfLayer], mesh: Mesh) -> str:
    """The component with the most elements of a group; the first of several with as many."""
    held: dict[str, int] = {}
    for one in weights:
        held[one.component] = held.get(one.component, 0) + one.shard_elements(mesh)
    return max(held, key=held.__getitem__)
