"""The state of a run between steps: weights, what the optimizer keeps for them, buffers and the step number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.boxes.box import Box
from shardwright.core.mesh.spec import Spec
from shardwright.core.model.optimizer import MASTER
from shardwright.core.pipeline.program import padded_stacks
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.delayed import DelayedTensor
from shardwright.core.stages.padded import PaddedStack
from shardwright.engine_jax.io.layer_io import Resting
from shardwright.engine_jax.lowering.resting import abstract_resting, resting, resting_names
from shardwright.engine_jax.lowering.shardings import named_sharding, weight_shardings
from shardwright.engine_jax.lowering.updates import gathered_parts
from shardwright.engine_jax.training.named_optimizer import initial
from shardwright.init import box_values
from shardwright.training.optimizer import FIRST, SECOND, frozen_names, kept_tensors, stacked_names
from shardwright.training.optimizers import OPTIMIZER, is_own

Leaf = TypeVar("Leaf")


class State(NamedTuple, Generic[Leaf]):
    """``weights`` are trained; ``resting``: in place of those that rest as codes, these; ``buffers`` are weights without a gradient; ``kept``: what the optimizer keeps for ``weights``, and
    their average, by prefix; ``shared``: its other state, and ``delayed``: factors and histories of delayed amaxes, by the names in a
    checkpoint.

    Each is a mapping from the table's names to arrays, layers stacked along the leading dim. ``step``: int32 scalar,
    the number of steps done.
    """

    weights: Mapping[str, Leaf]
    buffers: Mapping[str, Leaf]
    kept: Mapping[str, Mapping[str, Leaf]]
    shared: Mapping[str, Leaf]
    step: Leaf
    delayed: Mapping[str, Leaf] = {}
    resting: Mapping[str, Resting] = {}

    @property
    def first(self) -> Mapping[str, Leaf]:
        """AdamW's first moments."""
        return self.kept[FIRST]

    @property
    def second(self) -> Mapping[str, Leaf]:
        """AdamW's second moments."""
        return self.kept[SECOND]


class Tensor(NamedTuple):
    """One array of the state: its name in a checkpoint, the weight it belongs to, its shape, dtype and sharding.

    ``spec``: in the plan's terms. ``saved``: its shape in a checkpoint, without the padding of a vocabulary. ``first``: its elements before
    the first step, where it is no weight. ``stages``: where its layers are, in a pipeline."""

    name: str
    weight: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    spec: Spec
    saved: tuple[int, ...]
    first: float = 0.0

    @property
    def wide(self) -> str:
        """The name of the same weight in a wider dtype."""
        return MASTER.prefix + self.weight

    @property
    def is_of_the_weight(self) -> bool:
        """Whether it has the elements of the weight before the first step: it, or it in a wider dtype."""
        return bool(self.weight) and self.name in (self.weight, self.wide)

    stages: PaddedStack | None = None

    def parts(self, box: Box) -> Sequence[tuple[Box, Box]]:
        """The parts of a box of the array that a checkpoint has, each with its box there. The rest of the box is padding."""
        if self.stages is not None:
            return list(self.stages.saved(box))
        common = box.intersect(Box.whole(self.saved))
        return [] if common is None else [(common, common)]


def tensors_of(plan: Plan, mesh: Mesh) -> tuple[Tensor, ...]:
    """Every array of a plan's state except the step and what is shared, weights first, by their names in a checkpoint."""
    shardings, codes = weight_shardings(plan, mesh), resting_names(plan)
    padded = {} if plan.pipeline is None else padded_stacks(plan.request.table, plan.pipeline.choice)
    rows = {
        w.name: Tensor(
            w.name,
            w.name,
            w.stacked_shape if (stages := padded.get(w.stack or "")) is None else (stages.rows, *w.shape),
            jnp.dtype(w.dtype),
            shardings[w.name],
            w.stacked_at_rest,
            w.stacked_saved_shape,
            stages=stages,
        )
        for w in plan.weights
    }
    specs = {w.name: w.stacked_updated for w in plan.weights}
    # A weight that rests as codes is saved by those who update it.
    for name in codes:
        rows[name] = rows[name]._replace(sharding=named_sharding(specs[name], mesh), spec=specs[name])
    kept = [
        rows[one.weight]._replace(
            name=one.name,
            dtype=jnp.dtype(one.dtype),
            sharding=named_sharding(specs[one.weight], mesh),
            spec=specs[one.weight],
        )
        for one in kept_tensors(plan)
    ]
    delayed = [_delayed(one, padded.get(plan.by_name[one.weight].stack or ""), mesh) for one in plan.delayed_tensors]
    return (*rows.values(), *kept, *delayed)


def _delayed(one: DelayedTensor, stages: PaddedStack | None, mesh: Mesh) -> Tensor:
    """``stages``: where the layers are of a stack, of which only the first ones may be quantized."""
    return Tensor(
        one.name,
        "",
        one.shape if stages is None else (stages.rows, *one.shape[1:]),
        jnp.dtype(jnp.float32),
        named_sharding(one.spec, mesh),
        one.spec,
        one.shape,
        one.first,
        stages=None if stages is None else stages.of_first(one.shape[0]),
    )


Read = Callable[[Tensor, Sequence[Box]], Sequence[np.ndarray]]
"""``read(tensor, boxes)``: the elements of several boxes of a tensor of the state."""


def make_state(
    plan: Plan, mesh: Mesh, read: Read, step: int, shared: Mapping[str, np.ndarray] | None = None
) -> State[jax.Array]:
    """The state whose boxes are those that ``read`` returns; each device's own boxes are read, and no others.

    ``shared``: state of the optimizer; None before the first step, where an optimizer of optax also makes what it keeps."""

    def place(tensor: Tensor) -> jax.Array:
        indices = tensor.sharding.addressable_devices_indices_map(tensor.shape).values()
        # Replicas have the same box; it is read once.
        boxes = list(dict.fromkeys(box_of(index or (), tensor.shape) for index in indices))
        known = _padded(tensor, boxes, read)
        return jax.make_array_from_callback(
            tensor.shape, tensor.sharding, lambda index: known[box_of(index or (), tensor.shape)]
        )

    optimizer = plan.request.optimizer
    starts = shared is None and is_own(optimizer)
    tensors, codes = tensors_of(plan, mesh), resting_names(plan)
    rows = {
        one.name: place(one)
        for one in tensors
        if one.name not in codes and not (starts and one.name.startswith(OPTIMIZER))
    }
    number, at_rest = replicated(np.int32(step), mesh), _resting(plan, mesh, rows)
    if not starts:
        numbers = {name: replicated(value, mesh) for name, value in (shared or {}).items()}
        return assemble(plan, rows, numbers, number, at_rest)
    made, numbers = _initial(plan, mesh, rows)
    return assemble(plan, {**rows, **made}, numbers, number, at_rest)


def rounded(plan: Plan, masters: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """The weights that rest as codes, of what is kept of them in a wider dtype."""
    return {name: masters[name].astype(jnp.dtype(plan.by_name[name].dtype)) for name in resting_names(plan)}


def _resting(plan: Plan, mesh: Mesh, rows: Mapping[str, jax.Array]) -> Mapping[str, Resting]:
    names = resting_names(plan)
    if not names:
        return {}
    made, places = resting(plan, mesh), jax.tree.map(lambda one: one.sharding, abstract_resting(plan, mesh))
    masters = {name: rows[MASTER.prefix + name] for name in names}
    whole = partial(gathered_parts, plan, mesh)
    return jax.jit(lambda masters: made(whole(rounded(plan, masters))), out_shardings=places)(masters)


def _initial(
    plan: Plan, mesh: Mesh, rows: Mapping[str, jax.Array]
) -> tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]:
    """What an optimizer of optax keeps before the first step, by the names of a checkpoint, and its shared state."""
    optimizer = plan.request.optimizer
    frozen = frozen_names(plan)
    known = {**rows, **rounded(plan, {name: rows[MASTER.prefix + name] for name in resting_names(plan)})}
    weights = {w.name: known[w.name] for w in plan.weights if w.name not in frozen}
    places = {one.name: one.sharding for one in tensors_of(plan, mesh) if one.name.startswith(OPTIMIZER)}
    everywhere = NamedSharding(mesh, PartitionSpec())

    def made(weights: Mapping[str, jax.Array]) -> tuple[Mapping[str, jax.Array], Mapping[str, jax.Array]]:
        kept, shared = initial(optimizer, weights, stacked_names(plan))
        return {prefix + name: array for prefix, arrays in kept.items() for name, array in arrays.items()}, shared

    return jax.jit(made, out_shardings=(places, dict.fromkeys(optimizer.shared, everywhere)))(weights)


def _padded(tensor: Tensor, boxes: Sequence[Box], read: Read) -> dict[Box, np.ndarray]:
    """Boxes of an array: what is read of them, and zeros for padding."""
    parts = [(box, inside, saved) for box in boxes for inside, saved in tensor.parts(box)]
    # A box with no padding, whose elements are in one piece, is not copied.
    whole = {box for box, inside, _ in parts if inside == box}
    found = read(tensor, [saved for *_, saved in parts])
    known = {box: np.zeros(box.shape, tensor.dtype) for box in boxes if box not in whole}
    for (box, inside, _), array in zip(parts, found, strict=True):
        if box in whole:
            known[box] = np.asarray(array, tensor.dtype)
        else:
            known[box][inside.within(box).slices] = array
    return known


def initial_state(plan: Plan, mesh: Mesh, seed: int) -> State[jax.Array]:
    """The state before the first step: initial values made box by box, moments zero."""
    table = plan.request.table

    def read(tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
        if not tensor.is_of_the_weight:
            return [np.full(box.shape, tensor.first, tensor.dtype) for box in boxes]
        return [box_values(table.weight(tensor.weight), seed, box) for box in boxes]

    return make_state(plan, mesh, read, 0)


def abstract_state(plan: Plan, mesh: Mesh) -> State[jax.ShapeDtypeStruct]:
    """The state's shapes, dtypes and shardings, without values, to lower a step from."""
    rows = {
        row.name: jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=row.sharding) for row in tensors_of(plan, mesh)
    }
    everywhere = NamedSharding(mesh, PartitionSpec())
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    shared = {
        name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=everywhere)
        for name, (shape, dtype) in plan.request.optimizer.shared.items()
    }
    return assemble(plan, rows, shared, step, abstract_resting(plan, mesh))


def assemble(
    plan: Plan,
    rows: Mapping[str, Leaf],
    shared: Mapping[str, Leaf],
    step: Leaf,
    at_rest: Mapping[str, Resting],
) -> State[Leaf]:
    """A state from its arrays by the names of ``tensors_of``, the optimizer's shared state, and what rests as codes."""
    frozen = frozen_names(plan)
    trained = [w.name for w in plan.weights if w.name not in frozen and w.name not in at_rest]
    kept: dict[str, dict[str, Leaf]] = {one.prefix: {} for one in plan.request.kept}
    for one in kept_tensors(plan):
        kept[one.prefix][one.weight] = rows[one.name]
    return State(
        weights={name: rows[name] for name in trained},
        buffers={name: rows[name] for name in frozen},
        kept=kept,
        shared=dict(shared),
        step=step,
        delayed={one.name: rows[one.name] for one in plan.delayed_tensors},
        resting=at_rest,
    )


def arrays_of(state: State[Leaf]) -> Mapping[str, Leaf]:
    """Every array of a state except the step, by the names of ``tensors_of``; of weights that rest as codes the master weights."""
    return {
        **{name: state.kept[MASTER.prefix][name] for name in state.resting},
        **state.weights,
        **state.buffers,
        **{prefix + name: array for prefix, kept in state.kept.items() for name, array in kept.items()},
        **state.delayed,
    }


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard with this index in JAX."""
    bounds = [along.indices(size) for along, size in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in bounds), tuple(stop for _, stop, _ in bounds))


def replicated(number: np.ndarray | np.generic, mesh: Mesh) -> jax.Array:
    """A number or a small array, replicated on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(number.shape, sharding, lambda _: np.asarray(number))
