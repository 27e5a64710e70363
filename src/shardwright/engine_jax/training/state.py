"""The state of a run between steps: weights, their moments, buffers and the step number."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.lowering.shardings import weight_shardings
from shardwright.init import box_values
from shardwright.training.optimizer import FIRST, SECOND, frozen_names

Leaf = TypeVar("Leaf")


class State(NamedTuple, Generic[Leaf]):
    """``weights`` are trained; ``buffers`` are weights without a gradient; ``first`` and ``second`` are the moments of ``weights``.

    Each is a mapping from the table's names to arrays, layers stacked along the leading dim. ``step``: int32 scalar,
    the number of steps done.
    """

    weights: Mapping[str, Leaf]
    buffers: Mapping[str, Leaf]
    first: Mapping[str, Leaf]
    second: Mapping[str, Leaf]
    step: Leaf


class Tensor(NamedTuple):
    """One array of the state: its name in a checkpoint, the weight it belongs to, its shape, dtype and sharding.

    ``saved``: its shape in a checkpoint, without the padding of a vocabulary."""

    name: str
    weight: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: NamedSharding
    saved: tuple[int, ...]


def tensors_of(plan: Plan, mesh: Mesh) -> tuple[Tensor, ...]:
    """Every array of a plan's state except the step, weights first, by their names in a checkpoint."""
    shardings = weight_shardings(plan, mesh)
    frozen = frozen_names(plan)
    moments = jnp.dtype(plan.request.moments_dtype)
    rows = [
        Tensor(w.name, w.name, w.stacked_shape, jnp.dtype(w.dtype), shardings[w.name], w.stacked_saved_shape)
        for w in plan.weights
    ]
    for prefix in (FIRST, SECOND):
        rows += [
            row._replace(name=prefix + row.name, dtype=moments)
            for row in rows[: len(plan.weights)]
            if row.name not in frozen
        ]
    return tuple(rows)


Read = Callable[[Tensor, Sequence[Box]], Sequence[np.ndarray]]
"""``read(tensor, boxes)``: the elements of several boxes of a tensor of the state."""


def make_state(plan: Plan, mesh: Mesh, read: Read, step: int) -> State[jax.Array]:
    """The state whose boxes are those that ``read`` returns; each device's own boxes are read, and no others."""

    def place(tensor: Tensor) -> jax.Array:
        indices = tensor.sharding.addressable_devices_indices_map(tensor.shape).values()
        # Replicas have the same box; it is read once.
        boxes = list(dict.fromkeys(box_of(index or (), tensor.shape) for index in indices))
        known = _padded(tensor, boxes, read)
        return jax.make_array_from_callback(
            tensor.shape, tensor.sharding, lambda index: known[box_of(index or (), tensor.shape)]
        )

    return assemble(plan, {tensor.name: place(tensor) for tensor in tensors_of(plan, mesh)}, replicated(step, mesh))


def _padded(tensor: Tensor, boxes: Sequence[Box], read: Read) -> dict[Box, np.ndarray]:
    """Boxes of an array: what is read of them, and zeros for padding."""
    saved = Box.whole(tensor.saved)
    inside = {box: common for box in boxes if (common := box.intersect(saved)) is not None}
    found = dict(zip(inside, read(tensor, list(inside.values())), strict=True))
    known: dict[Box, np.ndarray] = {}
    for box in boxes:
        if inside.get(box) == box:
            known[box] = np.asarray(found[box], tensor.dtype)
            continue
        known[box] = np.zeros(box.shape, tensor.dtype)
        if box in inside:
            known[box][inside[box].within(box).slices] = found[box]
    return known


def initial_state(plan: Plan, mesh: Mesh, seed: int) -> State[jax.Array]:
    """The state before the first step: initial values made box by box, moments zero."""
    table = plan.request.table

    def read(tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
        if tensor.name != tensor.weight:
            return [np.zeros(box.shape, tensor.dtype) for box in boxes]
        return [box_values(table.weight(tensor.name), seed, box) for box in boxes]

    return make_state(plan, mesh, read, 0)


def abstract_state(plan: Plan, mesh: Mesh) -> State[jax.ShapeDtypeStruct]:
    """The state's shapes, dtypes and shardings, without values, to lower a step from."""
    rows = {
        row.name: jax.ShapeDtypeStruct(row.shape, row.dtype, sharding=row.sharding) for row in tensors_of(plan, mesh)
    }
    step = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return assemble(plan, rows, step)


def assemble(plan: Plan, rows: Mapping[str, Leaf], step: Leaf) -> State[Leaf]:
    """A state from its arrays by the names of ``tensors_of``."""
    frozen = frozen_names(plan)
    trained = [w.name for w in plan.weights if w.name not in frozen]
    return State(
        weights={name: rows[name] for name in trained},
        buffers={name: rows[name] for name in frozen},
        first={name: rows[FIRST + name] for name in trained},
        second={name: rows[SECOND + name] for name in trained},
        step=step,
    )


def arrays_of(state: State[Leaf]) -> Mapping[str, Leaf]:
    """Every array of a state except the step, by the names of ``tensors_of``."""
    return {
        **state.weights,
        **state.buffers,
        **{FIRST + name: array for name, array in state.first.items()},
        **{SECOND + name: array for name, array in state.second.items()},
    }


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """The box of a shard with this index in JAX."""
    bounds = [along.indices(size) for along, size in zip(index, shape, strict=True)]
    return Box(tuple(start for start, _, _ in bounds), tuple(stop for _, stop, _ in bounds))


def replicated(number: int, mesh: Mesh) -> jax.Array:
    """An int32 scalar, replicated on every device."""
    sharding = NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(number, np.int32))
