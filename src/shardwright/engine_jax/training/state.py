"""The state of a run between steps: weights, their moments, buffers and the step number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.lowering.shardings import at_rest_shape, saved_shape, weight_shardings
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
        Tensor(w.name, w.name, at_rest_shape(w), jnp.dtype(w.dtype), shardings[w.name], saved_shape(w))
        for w in plan.weights
    ]
    for prefix in (FIRST, SECOND):
        rows += [
            row._replace(name=prefix + row.name, dtype=moments)
            for row in rows[: len(plan.weights)]
            if row.name not in frozen
        ]
    return tuple(rows)


def make_state(plan: Plan, mesh: Mesh, read: Callable[[Tensor, Box], np.ndarray], step: int) -> State[jax.Array]:
    """The state whose boxes are those that ``read`` returns; each device's own boxes are read, and no others."""

    def place(tensor: Tensor) -> jax.Array:
        # Replicas have the same box; it is read once.
        known: dict[Box, np.ndarray] = {}

        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            box = box_of(index or (), tensor.shape)
            if box not in known:
                known[box] = _padded(tensor, box, read)
            return known[box]

        return jax.make_array_from_callback(tensor.shape, tensor.sharding, shard)

    return assemble(plan, {tensor.name: place(tensor) for tensor in tensors_of(plan, mesh)}, replicated(step, mesh))


def _padded(tensor: Tensor, box: Box, read: Callable[[Tensor, Box], np.ndarray]) -> np.ndarray:
    """A box of an array: what is read of it, and zeros for padding."""
    inside = box.intersect(Box.whole(tensor.saved))
    if inside == box or not box.size:
        return np.asarray(read(tensor, box), tensor.dtype)
    values = np.zeros(box.shape, tensor.dtype)
    if inside is not None:
        values[inside.within(box).slices] = read(tensor, inside)
    return values


def initial_state(plan: Plan, mesh: Mesh, seed: int) -> State[jax.Array]:
    """The state before the first step: initial values made box by box, moments zero."""
    table = plan.request.table

    def read(tensor: Tensor, box: Box) -> np.ndarray:
        if tensor.name != tensor.weight:
            return np.zeros(box.shape, tensor.dtype)
        return box_values(table.weight(tensor.name), seed, box)

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
