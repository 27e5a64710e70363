"""One step of the core's as a collective of JAX: over its axes, or over the part of one axis' devices that takes it."""

from __future__ import annotations

import jax

from shardwright.core.movement import Step


def gathered(array: jax.Array, step: Step, dim: int) -> jax.Array:
    """The parts of all devices along ``dim``."""
    return jax.lax.all_gather(array, step.axes, axis=dim, tiled=True, axis_index_groups=_groups(step))


def scattered(array: jax.Array, step: Step, dim: int) -> jax.Array:
    """Of the sum over all devices this one's part of ``dim``."""
    return jax.lax.psum_scatter(array, step.axes, scatter_dimension=dim, tiled=True, axis_index_groups=_groups(step))


def _groups(step: Step) -> list[list[int]] | None:
    return None if step.part is None else [list(group) for group in step.part.groups]
