"""The core's steps as collectives of JAX: over their axes, or over the sub-group of one axis that takes the step.

Given several axes, JAX's collectives count devices in the order of the axes, as ``axis_index`` does; its permute counts them
in mesh order (0.10.2, measured by a test). So all that is permuted goes through ``passed_on``, which names them in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from shardwright.core.plan.movement import Step
from shardwright.engine_jax.io.layer_io import Ring, index_of, size_of


def redistribute(array: jax.Array, way: Iterable[Step], names: Sequence[str]) -> jax.Array:
    """A device's part of an array, taken through the steps; ``names`` are the logical axes of its dims."""

    def dim(name: str | None) -> int:
        assert name is not None, way
        return names.index(name)

    for step in way:
        match step.kind:
            case "all-reduce":
                array = jax.lax.psum(array, step.axes)
            case "reduce-scatter":
                array = scattered(array, step, dim(step.target))
            case "all-gather":
                array = gathered(array, step, dim(step.source))
            case "all-to-all":
                array = jax.lax.all_to_all(array, step.axes, dim(step.target), dim(step.source), tiled=True)
            case "slice":
                array = own_shard(array, step.axes, dim(step.target))
    return array


def own_shard(array: jax.Array, axes: tuple[str, ...], dim: int) -> jax.Array:
    size = array.shape[dim] // size_of(axes)
    return jax.lax.dynamic_slice_in_dim(array, index_of(axes) * size, size, dim)


def gathered(array: jax.Array, step: Step, dim: int) -> jax.Array:
    """The parts of all devices along ``dim``."""
    return jax.lax.all_gather(array, step.axes, axis=dim, tiled=True, axis_index_groups=_groups(step))


def scattered(array: jax.Array, step: Step, dim: int) -> jax.Array:
    """Of the sum over all devices this one's part of ``dim``."""
    return jax.lax.psum_scatter(array, step.axes, scatter_dimension=dim, tiled=True, axis_index_groups=_groups(step))


def passed_on(array: jax.Array, ring: Ring) -> jax.Array:
    """What the device before this one held; JAX differentiates it, which passes a slope the other way."""
    onward = list(zip(ring.numbers, (*ring.numbers[1:], ring.numbers[0]), strict=True))
    return jax.lax.ppermute(array, ring.in_mesh_order, onward)


def _groups(step: Step) -> list[list[int]] | None:
    return None if step.subgroup is None else [list(group) for group in step.subgroup.groups]
