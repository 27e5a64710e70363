"""One step of the core's as a collective of JAX: over its axes, or over the part of one axis' devices that takes it.

Given several axes, JAX's collectives count devices in the order of the axes, as ``axis_index`` does; its permute counts them
in mesh order (0.10.2, measured by a test). So all that is permuted goes through ``passed_on``, which names them in mesh order.
"""

from __future__ import annotations

import jax

from shardwright.core.plan.movement import Step
from shardwright.engine_jax.io.layer_io import Ring


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
    return None if step.part is None else [list(group) for group in step.part.groups]
