"""How a tensor is resharded in the forward pass, and its gradient in the backward pass.

The planner counts these steps, and the engines execute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwright.core.engines.engines import ENGINES, Engine
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.precision import sent_dtype, summed_dtype
from shardwright.core.model.table import Move, Weight, as_torch_stores, of_one_layer
from shardwright.core.plan.movement import Collective, ReshardStep, movement, reshard_steps
from shardwright.core.plan.plan import TensorPlan
from shardwright.core.resolution.gradients import partial_axes, partial_gradient_axes
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import operand_spec, resolve_weight
from shardwright.core.resolution.update import held_gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class Resharding:
    """The resharding of an activation at a move, from the spec ``before`` to the spec ``after``.

    ``partial``: the axes over which the activation is partial before. ``cotangent_partial``: the axes over which its
    cotangent is partial after. ``shape``: of the unsharded tensor in one microbatch, by the logical axes of ``before``.
    Groups of tokens are the chunks of a row, so ``groups`` and ``tokens`` are one dim here, as long as the row.
    ``component``: the component to which the communication is attributed.
    """

    component: str
    before: Spec
    after: Spec
    partial: tuple[str, ...]
    cotangent_partial: tuple[str, ...]
    shape: Mapping[str, int]

    def forward(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        return reshard_steps(self.before, self.after, self.partial, mesh)

    def backward(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        """The steps of the cotangent."""
        return reshard_steps(self.after, self.before, self.cotangent_partial, mesh)


def resharding(request: Request, rows: Mapping[str, TensorPlan], move: Move) -> Resharding:
    """The resharding of a move of the table under a layout; ``rows`` are the plan's, by name."""
    source, target = rows[move.source], rows[move.target]
    return resharding_of_rows(move, source, target, request.layout, request.microbatches, request.length)


@lru_cache(maxsize=4096)
def resharding_of_rows(
    move: Move, source_row: TensorPlan, target_row: TensorPlan, layout: Layout, microbatches: int, length: int
) -> Resharding:
    moved = _moved(move, source_row.in_use, target_row.in_use, layout)
    shape = dict(zip(moved.source, source_row.shape, strict=True))
    shape["batch"] //= microbatches
    for name in ("groups", "length"):
        if name in moved.before.logical_axes:
            shape[name] = length
    return Resharding(
        component=(target_row if move.kind == "keys" else source_row).component,
        before=moved.before,
        after=moved.after,
        partial=moved.partial,
        cotangent_partial=moved.cotangent_partial,
        shape={name: shape[name] for name in moved.before.logical_axes},
    )


class _Moved(NamedTuple):
    """What a move does, whatever the sizes. ``source``: the logical axes before it, of which some may go, in their names after it."""

    source: tuple[str, ...]
    before: Spec
    after: Spec
    partial: tuple[str, ...]
    cotangent_partial: tuple[str, ...]


@lru_cache(maxsize=4096)
def _moved(move: Move, source_in_use: Spec, target: Spec, layout: Layout) -> _Moved:
    source = source_in_use.renamed(move.renamed or {})
    names = tuple(name for name in source.logical_axes if name in target.logical_axes)
    return _Moved(
        source=source.logical_axes,
        before=Spec.build(names, {name: source.axes_of(name) for name in names}),
        after=Spec.build(names, {name: target.axes_of(name) for name in names}),
        partial=partial_axes(layout, move.summed),
        cotangent_partial=partial_axes(layout, move.feeds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightResharding:
    """The resharding of one layer of a weight from rest to use, and of its gradient back to rest.

    ``gathered``: the spec after the all-gather. ``operand``: the spec of what a device multiplies with, ``gathered`` or a
    slice of it. The gradient is reduce-scattered over ``scattered``. ``replicated_gradient``: the axes over which this use
    makes the same gradient on each device and the gradients are summed all the same, so that only the first device's counts.
    These are axes over which another use's gradient is partial, and, under PyTorch, axes that store the weight by a rule and
    are idle in the component, since ``fully_shard`` reduces over all axes that it gathers over. ``gather_dtype``,
    ``reduce_dtype``: the dtypes of the gather and the reduction (``core/model/precision.py``). ``kept``: the gathered weight stays
    from the forward to the backward pass.
    """

    at_rest: Spec
    gathered: Spec
    operand: Spec
    scattered: tuple[str, ...]
    replicated_gradient: tuple[str, ...]
    gather_dtype: str
    reduce_dtype: str
    kept: bool


def weight_reshardings(request: Request, mesh: Mesh, tensor: TensorPlan) -> Mapping[str, WeightResharding]:
    """The reshardings of a weight by the component that uses it, its own first. A tied weight has two."""
    placed = _placed(request, tensor)
    return reshardings_of_weight(placed, request.layout, mesh.outline, request.engine, request.dtype, request.summed_in)


@dataclass(frozen=True, slots=True)
class PlacedWeight(HashedOnce):
    """One layer of a weight, with what a plan has of it but its shape in memory. ``gradient``: the axes over which it is reduced."""

    weight: Weight
    at_rest: Spec
    in_use: Spec
    updated: Spec
    gradient: tuple[str, ...]
    dtype: str

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.weight, self.at_rest, self.in_use, self.updated, self.gradient, self.dtype)


def _placed(request: Request, tensor: TensorPlan) -> PlacedWeight:
    return _placed_weight(request.table.weight(tensor.name), tensor)


@lru_cache(maxsize=8192)
def _placed_weight(weight: Weight, tensor: TensorPlan) -> PlacedWeight:
    assert tensor.at_rest is not None
    return _first_of_equal(
        PlacedWeight(
            of_one_layer(weight), tensor.at_rest, tensor.in_use, tensor.updated, tuple(tensor.gradient), tensor.dtype
        )
    )


@lru_cache(maxsize=8192)
def _first_of_equal(placed: PlacedWeight) -> PlacedWeight:
    return placed


@lru_cache(maxsize=4096)
def reshardings_of_weight(
    placed: PlacedWeight, layout: Layout, mesh: Mesh, engine: Engine, computation: str, summed_in: str
) -> Mapping[str, WeightResharding]:
    """``mesh``: an outline. The sizes of axes decide nothing else."""
    weight, properties = placed.weight, ENGINES[engine]
    stored = as_torch_stores(weight) if properties.merges_dims else weight
    at_rest, own = (_of_one_layer(spec, len(stored.shape)) for spec in (placed.at_rest, placed.in_use))
    reduced = mesh.larger_than_one(placed.gradient)
    found = {}
    for component in (weight.component, *weight.uses):
        second = component if component != weight.component else None
        in_use = resolve_weight(stored, layout, mesh, engine, second).in_use if second else own
        operand = operand_spec(in_use, component, layout, mesh)
        sliced = [axis for axis in operand.axes if axis not in at_rest.axes]
        gathered = operand.without(sliced)
        partial = {*partial_gradient_axes(stored, layout, operand, second), *sliced}
        summed = dict.fromkeys(reduced)
        if properties.reduces_over_gathered:
            summed |= dict.fromkeys(axis for axis in mesh.larger_than_one(at_rest.axes) if axis not in gathered.axes)
        found[component] = WeightResharding(
            at_rest=at_rest,
            gathered=gathered,
            operand=operand,
            scattered=tuple(axis for axis in reduced if axis in at_rest.axes),
            replicated_gradient=tuple(axis for axis in summed if axis not in partial and axis not in gathered.axes),
            gather_dtype=sent_dtype(weight, placed.dtype, computation),
            reduce_dtype=summed_dtype(weight, summed_in, computation),
            kept=weight.stack is not None
            and layout.keeps_gathered(a for a in mesh.larger_than_one(at_rest.axes) if a not in gathered.axes),
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """The resharding of one layer of a weight's gradient from the weight's spec at rest to that of its update, and of the updated weight
    back to rest.

    ``held``: the spec in which gradients are summed over microbatches. The gradient is reduce-scattered over ``scattered`` in each
    microbatch. It is partial over ``late`` until after the last one. ``dtype``: in which it is summed.
    """

    at_rest: Spec
    held: Spec
    in_update: Spec
    scattered: tuple[str, ...]
    late: tuple[str, ...]
    dtype: str

    def in_microbatches(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        """The steps of the gradient of each microbatch."""
        return reshard_steps(self.at_rest, self.held, self.scattered, mesh)

    def after_them(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        """The steps of the sum over microbatches."""
        return reshard_steps(self.held, self.in_update, self.late, mesh)

    def own(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        """The steps from a weight to the part of it that a device updates. Nothing is sent."""
        return reshard_steps(self.at_rest, self.in_update, (), mesh)

    def back(self, mesh: Mesh) -> tuple[ReshardStep, ...]:
        """The steps from the updated parts to the weight."""
        return reshard_steps(self.in_update, self.at_rest, (), mesh)


def weight_update(request: Request, mesh: Mesh, tensor: TensorPlan) -> WeightUpdate:
    """The update of a weight, in the dims of one layer."""
    return update_of_weight(
        _placed(request, tensor), len(tensor.shape), request.layout, mesh.outline, request.dtype, request.summed_in
    )


def _of_one_layer(spec: Spec, dims: int) -> Spec:
    """A spec without the dim of stacked layers: with that many dims."""
    return spec if len(spec.dims) == dims else Spec(spec.dims[len(spec.dims) - dims :])


@lru_cache(maxsize=4096)
def update_of_weight(
    placed: PlacedWeight, dims: int, layout: Layout, mesh: Mesh, computation: str, summed_in: str
) -> WeightUpdate:
    """``dims``: of one layer. ``mesh``: an outline."""
    at_rest, in_update = (_of_one_layer(spec, dims) for spec in (placed.at_rest, placed.updated))
    held = held_gradient(layout, at_rest, in_update)
    partial = [axis for axis in mesh.larger_than_one(placed.gradient) if axis not in at_rest.axes]
    return WeightUpdate(
        at_rest=at_rest,
        held=held,
        in_update=in_update,
        scattered=tuple(axis for axis in partial if axis in held.axes),
        late=tuple(axis for axis in partial if axis not in held.axes),
        dtype=summed_dtype(placed.weight, summed_in, computation),
    )


class WeightMoves(NamedTuple):
    """What JAX sends of one layer of a weight. ``uses``: for each use with a gather of its own its component, with the gathers and the
    reduce-scatters of its gradient. ``reduces``: the sums over replicas; ``gathers_updated``: of what each device has updated."""

    uses: tuple[tuple[str, WeightResharding, tuple[Collective, ...], tuple[Collective, ...]], ...]
    update: WeightUpdate
    reduces: tuple[Collective, ...]
    gathers_updated: tuple[Collective, ...]


def moves_of(request: Request, mesh: Mesh, tensor: TensorPlan) -> WeightMoves:
    placed = _placed(request, tensor)
    return moves_of_weight(placed, tensor.shape, request.layout, mesh, request.engine, request.dtype, request.summed_in)


@lru_cache(maxsize=4096)
def moves_of_weight(
    placed: PlacedWeight,
    sizes: tuple[int, ...],
    layout: Layout,
    mesh: Mesh,
    engine: Engine,
    computation: str,
    summed_in: str,
) -> WeightMoves:
    """``sizes``: the shape of a layer in memory."""
    shape = dict(zip(placed.in_use.logical_axes[-len(sizes) :], sizes, strict=True))
    uses = reshardings_of_weight(placed, layout, mesh.outline, engine, computation, summed_in)
    update = update_of_weight(placed, len(sizes), layout, mesh.outline, computation, summed_in)
    # Two uses with the same resharding share one gather.
    components: dict[WeightResharding, str] = {}
    for component, use in uses.items():
        components.setdefault(use, component)
    found: list[tuple[str, WeightResharding, tuple[Collective, ...], tuple[Collective, ...]]] = []
    for use, component in components.items():
        parts = (use.gathered, use.at_rest, use.scattered), (update.at_rest, update.held, update.scattered)
        scatters = [step for part in parts for step in movement(*part, shape, mesh)] if placed.gradient else ()
        found.append((component, use, movement(use.at_rest, use.gathered, (), shape, mesh), tuple(scatters)))
    return WeightMoves(
        uses=tuple(found),
        update=update,
        reduces=movement(update.held, update.in_update, update.late, shape, mesh),
        gathers_updated=movement(update.in_update, update.at_rest, (), shape, mesh),
    )


def same_arrays(request: Request, rows: Mapping[str, TensorPlan], mesh: Mesh) -> dict[str, str]:
    """Queries and keys that are the same array before and after a move, by their names after it. Other moves do more than reshard."""
    return {
        move.target: move.source
        for move in request.table.moves
        if move.kind in ("queries", "keys")
        and move.source in rows
        and move.target in rows
        and _moves_nothing(move, rows[move.source].in_use, rows[move.target].in_use, mesh.outline)
    }


@lru_cache(maxsize=4096)
def _moves_nothing(move: Move, source: Spec, target: Spec, mesh: Mesh) -> bool:
    return not reshard_steps(source.renamed(move.renamed or {}), target, (), mesh)
