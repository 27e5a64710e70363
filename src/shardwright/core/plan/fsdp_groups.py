"""FSDP parameter groups: the weights that ``fully_shard`` gathers in one all-gather and reduces in one reduce-scatter.

A group has the weights of one layer (or of the ends of the model) with the same gathered axes and dtype. ``fully_shard``
all-reduces a group's gradients over the replica axes that all its weights share. The gradients are all-reduced over a
weight's other replica axes after the last microbatch.

And update groups: the weights of one layer, or of one end of the model, whose update is sharded over the same axes, and the weights are not. A group has one reduce-scatter
of its gradients, and one all-gather of its updated weights, for each of up to two sets of axes: those that shard the gradient in each
microbatch, and those that shard it after the last one. ``fully_shard`` has no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, prod

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import shard_box, shard_range
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.table import ModelTable, Weight, name_in_layer
from shardwright.core.plan.movement import Collective
from shardwright.core.plan.plan import Phase, Plan, TensorPlan
from shardwright.core.plan.resharding import weight_reshardings, weight_update
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
    ``apart``: where a model has ends and no layers, the passes in which its gradient is made, as those of an end that all stages share: of a
    group all gradients are reduced in one pass.
    ``in_update``: the spec of its update. ``update_splits``: the axes that shard the update and not the weight, in one or two sets, of which
    the second shards what the first leaves; ``num_in_microbatches``: how many of them shard the gradient in each microbatch.
    ``kept``: it stays gathered from the forward to the backward pass.
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
    in_update: Spec
    update_splits: tuple[tuple[str, ...], ...] = ()
    num_in_microbatches: int = 0
    of_codes: bool = False
    kept: bool = False
    apart: str = ""

    @property
    def update_dim(self) -> int:
        """The dim that ``update_splits`` shard; 0 where there are none."""
        return next((self.in_update.dim_of(axis) or 0 for axes in self.update_splits for axis in axes), 0)

    def box(self, mesh: Mesh, rank: int) -> Box | None:
        """The shard of a rank at rest, in the stored dims; None where the rank has none. ``fully_shard`` shards what a rank
        has in use over the product of the gathered axes."""
        return shard_box(self.at_rest, mesh, self.shape, rank, in_turn=self.in_use.axes)

    def update_box(self, mesh: Mesh, rank: int) -> Box | None:
        """The part of its shard at rest that a rank updates; None where it has none."""
        box = self.box(mesh, rank)
        if box is None or not self.update_splits:
            return box
        here, dim = mesh.coordinates(rank), self.update_dim
        splits = [
            (mesh.size(axes), sum(here[axis] * mesh.size(axes[n + 1 :]) for n, axis in enumerate(axes)))
            for axes in self.update_splits
        ]
        start, stop = (box.start[dim] + at for at in shard_range(box.shape[dim], splits))
        if start == stop:
            return None
        return Box((*box.start[:dim], start, *box.start[dim + 1 :]), (*box.stop[:dim], stop, *box.stop[dim + 1 :]))

    def saved_box(self, mesh: Mesh, rank: int, *, in_update: bool = False) -> Box | None:
        """The part of the shard, at rest or in the update, that a checkpoint has; None where the rank has none, or padding only."""
        box = self.update_box(mesh, rank) if in_update else self.box(mesh, rank)
        return box and box.intersect(Box.whole(self.saved_shape))

    @property
    def storage_dim(self) -> int:
        """The dim that the gathered axes shard; 0 where there are none."""
        return next((self.at_rest.dim_of(axis) or 0 for axis in self.gathered), 0)

    def shape_at_rest(self, mesh: Mesh) -> tuple[int, ...]:
        """The largest shard at rest. The storage dim is padded until its axes divide it."""
        sizes = [size // mesh.size(dim.axes) for size, dim in zip(self.shape, self.in_use.dims, strict=True)]
        # A weight of a user's own model may have no dim.
        if sizes:
            sizes[self.storage_dim] = ceil(sizes[self.storage_dim] / mesh.size(self.gathered))
        return tuple(sizes)

    def shape_in_update(self, mesh: Mesh, splits: int) -> tuple[int, ...]:
        """The largest shard after the first ``splits`` of the splits of the update, padded until all are equal."""
        sizes = list(self.shape_at_rest(mesh))
        for axes in self.update_splits[:splits]:
            sizes[self.update_dim] = ceil(sizes[self.update_dim] / mesh.size(axes))
        return tuple(sizes)

    def shard_elements(self, mesh: Mesh) -> int:
        """Elements of the largest shard at rest."""
        return prod(self.shape_at_rest(mesh))


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

    @property
    def kept(self) -> bool:
        return self.weights[0].kept

    def other_replicas(self, one: WeightOfLayer) -> tuple[str, ...]:
        """The axes over which a weight's gradient is all-reduced after the last microbatch, apart from the group. None where the update
        is sharded: its own group then reduces the gradient (``UpdateGroup``)."""
        return () if one.update_splits else tuple(axis for axis in one.all_reduced if axis not in self.replicas)

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
    update = weight_update(request, mesh, row)
    summed = mesh.larger_than_one(axis for axis, kind in row.gradient.items() if kind == "all-reduce")
    splits = (update.scattered, tuple(axis for axis in update.late if axis in update.in_update.axes))
    recipe, quantized = request.precision, 0
    if recipe is not None and recipe.of_codes and mesh.larger_than_one(gathered):
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
        in_update=update.in_update,
        update_splits=tuple(axes for axes in splits if axes),
        num_in_microbatches=1 if update.scattered else 0,
        kept=use.kept,
        apart=_apart(request.table, weight),
    )


def _apart(table: ModelTable, weight: Weight) -> str:
    if table.owner != "ours" or any(weight.stack is not None for weight in table.weights):
        return ""
    ends = {"embedding" if component == "embedding" else "logits" for component in (weight.component, *weight.uses)}
    return " and ".join(sorted(ends))


def groups_of(weights: Iterable[WeightOfLayer]) -> tuple[FsdpGroup, ...]:
    """The groups of one layer's weights, the largest first; weights that are not gathered come last."""
    found: dict[tuple, list[WeightOfLayer]] = {}
    for one in weights:
        key = (one.gathered, one.gather_dtype if one.gathered else "", one.dtype, one.of_codes, one.apart)
        found.setdefault(key, []).append(one)
    groups = []
    for (axes, _, _, of_codes, _), members in found.items():
        shared = [axis for axis in members[0].all_reduced if all(axis in other.all_reduced for other in members)]
        # A gradient is scattered before its shards are all-reduced, which ``fully_shard`` cannot do.
        by_fully_shard = bool(axes) and not of_codes and not any(one.update_splits for one in members)
        groups.append(FsdpGroup(weights=tuple(members), axes=axes, replicas=tuple(shared) if by_fully_shard else ()))
    return tuple(sorted(groups, key=lambda group: (not group.axes, -sum(prod(one.shape) for one in group.weights))))


def component_of(weights: Sequence[WeightOfLayer], mesh: Mesh) -> str:
    """The component with the most elements of a group; the first of several with as many."""
    held: dict[str, int] = {}
    for one in weights:
        held[one.component] = held.get(one.component, 0) + one.shard_elements(mesh)
    return max(held, key=held.__getitem__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateGroup:
    """``splits``: the sets of axes, those of microbatches first. ``num_in_microbatches``: how many of them are, 0 or 1. ``all_reduced``:
    the axes over which the shards are summed in the end."""

    weights: tuple[WeightOfLayer, ...]
    splits: tuple[tuple[str, ...], ...]
    num_in_microbatches: int
    all_reduced: tuple[str, ...]

    def collectives(self, mesh: Mesh, layers: int, microbatches: int) -> Iterator[tuple[Phase, Collective, str, int]]:
        """The reductions of its gradients and the gathers of its updated weights, each with its phase, its dtype, and how often it is done in
        a step."""
        first, sizes = self.weights[0], [self.unsharded_elements(mesh, number) for number in range(len(self.splits))]
        for number, (axes, size) in enumerate(zip(self.splits, sizes, strict=True)):
            scatter = Collective(kind="reduce-scatter", axes=axes, elements_per_device=size)
            if number < self.num_in_microbatches:
                yield "backward", scatter, first.reduce_dtype, layers * microbatches
            else:
                yield "update", scatter, first.reduce_dtype, layers
        if self.all_reduced:
            shards = self.shard_elements(mesh, len(self.splits))
            reduce = Collective(kind="all-reduce", axes=self.all_reduced, elements_per_device=shards)
            yield "update", reduce, first.reduce_dtype, layers
        for axes, size in reversed(list(zip(self.splits, sizes, strict=True))):
            yield "update", Collective(kind="all-gather", axes=axes, elements_per_device=size), first.dtype, layers

    def unsharded_elements(self, mesh: Mesh, number: int) -> int:
        """Elements of all its weights before a split, by its number: on a device that has the most, padded so that all shards are equal."""
        return self.shard_elements(mesh, number + 1) * mesh.size(self.splits[number])

    def shard_elements(self, mesh: Mesh, number: int) -> int:
        """Elements of the largest shards after the first ``number`` splits."""
        return sum(prod(one.shape_in_update(mesh, number)) for one in self.weights)


def update_groups(weights: Iterable[WeightOfLayer]) -> tuple[UpdateGroup, ...]:
    """The groups of the weights of one layer, or of the ends, in the order of the weights; none of weights whose update is sharded as they are."""
    found: dict[tuple[object, ...], list[WeightOfLayer]] = {}
    for one in weights:
        if one.update_splits:
            # The gradient of the logits is made first and that of the embedding last: neither waits for the other.
            end = one.component if one.stack is None else ""
            key = (end, one.update_splits, one.num_in_microbatches, one.all_reduced, one.dtype, one.reduce_dtype)
            found.setdefault(key, []).append(one)
    return tuple(
        UpdateGroup(
            weights=tuple(members),
            splits=members[0].update_splits,
            num_in_microbatches=members[0].num_in_microbatches,
            all_reduced=members[0].all_reduced,
        )
        for members in found.values()
    )
