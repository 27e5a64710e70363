"""The core's steps as JAX collectives, over their axes or in hops over sub-groups of one axis.

Given several axes, JAX's collectives number devices in the order of the axes, as ``axis_index`` does. Its permute numbers them
in mesh order (0.10.2, measured by a test). So every permute goes through ``passed_on``, which gives the axes in mesh order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

import jax
import jax.numpy as jnp

from shardwright.core.mesh.hops import Hop, split_dim
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
    if step.hops is None:
        return jax.lax.all_gather(array, step.axes, axis=dim, tiled=True)
    if step.hops.in_place:
        for hop in step.hops.chunks[0]:
            array = jax.lax.all_gather(array, hop.axes, axis=dim, tiled=True, axis_index_groups=_groups(hop))
        return array
    sizes, chunks = step.hops
    along = split_dim(array.shape, dim, len(chunks))
    parts = [
        _gathered_apart(part, hops, sizes, dim)
        for part, hops in zip(_split(array, len(chunks), along), chunks, strict=False)
    ]
    # The devices are a dim before that of the shards.
    whole = jnp.concatenate(parts, axis=along + (along >= dim))
    return whole.reshape(*whole.shape[:dim], -1, *whole.shape[dim + 2 :])


def scattered(array: jax.Array, step: ReshardStep, dim: int) -> jax.Array:
    """This device's shard, along ``dim``, of the sum over all devices."""
    if step.hops is None:
        return jax.lax.psum_scatter(array, step.axes, scatter_dimension=dim, tiled=True)
    if step.hops.in_place:
        for hop in reversed(step.hops.chunks[0]):
            array = jax.lax.psum_scatter(
                array, hop.axes, scatter_dimension=dim, tiled=True, axis_index_groups=_groups(hop)
            )
        return array
    sizes, chunks = step.hops
    devices = prod(sizes)
    apart = array.reshape(*array.shape[:dim], devices, -1, *array.shape[dim + 1 :])
    shard = (*array.shape[:dim], array.shape[dim] // devices, *array.shape[dim + 1 :])
    along = split_dim(shard, dim, len(chunks))
    parts = _split(apart, len(chunks), along + (along >= dim))
    found = [_scattered_apart(part, hops, sizes, dim) for part, hops in zip(parts, chunks, strict=False)]
    return jnp.concatenate(found, axis=along)


def _split(array: jax.Array, num: int, dim: int) -> list[jax.Array]:
    """As many parts of almost equal size along a dim, none of them empty."""
    return jnp.array_split(array, min(num, array.shape[dim]), axis=dim)


def _gathered_apart(array: jax.Array, hops: Sequence[Hop], sizes: Sequence[int], dim: int) -> jax.Array:
    """The shards of all devices along a new dim before ``dim``, in the order of the devices."""
    found: list[int] = []
    for hop in hops:
        array = jax.lax.all_gather(array, hop.axes, axis=dim, tiled=False, axis_index_groups=_groups(hop))
        array = array.reshape(*array.shape[:dim], *(sizes[place] for place in hop.digits), *array.shape[dim + 1 :])
        found = [*hop.digits, *found]
    order = [dim + found.index(place) for place in range(len(sizes))]
    array = array.transpose(*range(dim), *order, *range(dim + len(sizes), array.ndim))
    return array.reshape(*array.shape[:dim], prod(sizes), *array.shape[dim + len(sizes) :])


def _scattered_apart(array: jax.Array, hops: Sequence[Hop], sizes: Sequence[int], dim: int) -> jax.Array:
    """This device's shard of the sum over all devices, which are the dim ``dim``; that dim is removed."""
    left = list(range(len(sizes)))
    array = array.reshape(*array.shape[:dim], *sizes, *array.shape[dim + 1 :])
    for hop in reversed(hops):
        first = [dim + left.index(place) for place in hop.digits]
        others = [place for place in range(dim, array.ndim) if place not in first]
        array = array.transpose(*range(dim), *first, *others)
        array = array.reshape(*array.shape[:dim], -1, *array.shape[dim + len(first) :])
        array = jax.lax.psum_scatter(
            array, hop.axes, scatter_dimension=dim, tiled=False, axis_index_groups=_groups(hop)
        )
        left = [place for place in left if place not in hop.digits]
    return array


def passed_on(array: jax.Array, ring: Ring) -> jax.Array:
    """The array of the previous device in the ring. JAX differentiates it: cotangents are sent in the reverse direction."""
    onward = list(zip(ring.numbers, (*ring.numbers[1:], ring.numbers[0]), strict=False))
    return jax.lax.ppermute(array, ring.in_mesh_order, onward)


def _groups(hop: Hop) -> list[list[int]] | None:
    return None if hop.subgroup is None else [list(group) for group in hop.subgroup.groups]
