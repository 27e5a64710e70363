"""The core's steps as JAX collectives, over their axes or over sub-groups of one axis.

Given several axes, JAX's collectives number devices in the order of the axes, as ``axis_index`` does. Its permute numbers them
in mesh order (0.10.2, measured by a test). So every permute goes through ``passed_on``, which gives the axes in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax

from shardwright.core.plan.movement import ReshardStep
from shardwright.engine_jax.io.layer_io import Ring, index_of, size_of


def redistribute(array: jax.Array, steps: Iterable[ReshardStep], names: Sequence[str]) -> jax.Array:
    """A local shard after the steps of a resharding; ``names`` are the logical axes of its dims."""

    def dim(name: str | None) -> int:
        assert name is not None, steps
        return names.index(name)

    for step in steps:
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
    """This device's shard of ``dim``; nothing is sent."""
    size = array.shape[dim] // size_of(axes)
    return jax.lax.dynamic_slice_in_dim(array, index_of(axes) * size, size, dim)


def gathered(array: jax.Array, step: ReshardStep, dim: int) -> jax.Array:
    """The shards of all devices, concatenated along ``dim``."""
    return jax.lax.all_gather(array, step.axes, axis=dim, tiled=True, axis_index_groups=_groups(step))


def scattered(array: jax.Array, step: ReshardStep, dim: int) -> jax.Array:
    """This device's shard, along ``dim``, of the sum over all devices."""
    return jax.lax.psum_scatter(array, step.axes, scatter_dimension=dim, tiled=True, axis_index_groups=_groups(step))


def passed_on(array: jax.Array, ring: Ring) -> jax.Array:
    """The array of the previous device in the ring. JAX differentiates it: cotangents are sent in the reverse direction."""
    onward = list(zip(ring.numbers, (*ring.numbers[1:], ring.numbers[0]), strict=True))
    return jax.lax.ppermute(array, ring.in_mesh_order, onward)


def _groups(step: ReshardStep) -> list[list[int]] | None:
    return None if step.subgroup is None else [list(group) for group in step.subgroup.groups]
