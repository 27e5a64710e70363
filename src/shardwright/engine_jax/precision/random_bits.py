"""Random bits (``core/recipes/random_bits.py``) by JAX's own operation, and the counters of the elements that a device has.

N rows of an operand, M columns, P pairs of these; B rows of the batch, S tokens of each, as they are in the operand. Counters and bits are uint32.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry_2x32

from shardwright.core.quantization.elements import Elements, Tiled
from shardwright.core.recipes.random_bits import ROUNDING_BITS, SIGNS, Words, rounding_of, stride_of
from shardwright.core.recipes.recipe import CONTRACTED, DIMS, Dim, Operand, Product
from shardwright.engine_jax.io.layer_io import LowPrecision, Site, index_of, size_of

Key = tuple[jax.Array, jax.Array]
"""64 bits, the two words of 32 bits each."""


def threefry(key: Key, first: jax.Array, second: jax.Array) -> Key:
    """The bits of each counter, whose two words have one shape or broadcast."""
    first, second = jnp.broadcast_arrays(first, second)
    # One array of even size, whose halves are the words of the counters.
    bits = threefry_2x32(key, jnp.concatenate((first.ravel(), second.ravel())))
    x, y = jnp.split(bits, 2)
    return x.reshape(first.shape), y.reshape(first.shape)


def signs(site: Site, size: int) -> jax.Array:
    """1 or -1 for each place of a group of the Hadamard transform, float32: the same in all steps and layers of a run."""
    bits = jnp.stack([word >> jnp.arange(32, dtype=jnp.uint32) for word in _of_run(SIGNS, site)])
    return 1.0 - 2.0 * (bits.ravel()[:size] & 1).astype(jnp.float32)


def random_numbers(
    place: tuple[Product, Operand], low: LowPrecision, site: Site, shape: Sequence[int], of_experts: Slots | None = None
) -> jax.Array | None:
    """For stochastic rounding of an operand, a number for each element, int32 below 2^24; None where it is rounded to the nearest.

    ``shape``: ``[other, *contracted]``, or of the matrices of experts ``[experts, other, contracted]``. ``of_experts``: of rows that experts
    share, which come first.
    """
    if low.quantizers[place].rounding != "stochastic":
        return None
    (product, operand), elements = place, low.elements.get(place, Elements(dims={}))
    first, second = DIMS[operand]
    by_columns = CONTRACTED[product] == first and of_experts is None
    outer = shape[:1] if operand == "weight" and len(shape) == 3 else ()
    other, *contracted = shape[len(outer) :]
    rows, columns = (prod(contracted), other) if by_columns else (other, prod(contracted))
    if of_experts is not None:
        row_N, group = of_experts.number_N, of_experts.expert_N
    else:
        filled = contracted[-1] if by_columns and len(contracted) > 1 else None
        row_N, group = _row_numbers(elements, first, site, rows, filled), jnp.arange(outer[0]) if outer else None
    bits = _bits(_of_layer(rounding_of(product, operand, low.name), site), row_N, elements, second, columns, group)
    return (bits.swapaxes(-1, -2) if by_columns else bits).reshape(*shape)


class Slots(NamedTuple):
    """Rows that experts share: the number of each among those of its expert, and the expert."""

    number_N: jax.Array
    expert_N: jax.Array


def _of_run(words: Words, site: Site) -> Key:
    first, second = (jnp.asarray(word).astype(jnp.uint32) for word in site.seed)
    return threefry((jnp.uint32(words[0]), jnp.uint32(words[1])), first, second)


def _of_layer(words: Words, site: Site) -> Key:
    step, layer = (jnp.asarray(number).astype(jnp.uint32) for number in (site.step, site.layer))
    return threefry(_of_run(words, site), step, layer)


def _row_numbers(elements: Elements, dim: Dim, site: Site, num: int, filled: int | None) -> jax.Array:
    """The first counter of each of ``num`` rows. ``filled``: so many tokens of each row of the batch, with those that fill it up."""
    if dim not in elements.dims:
        return jnp.arange(num, dtype=jnp.uint32)
    if dim != "tokens":
        found = _numbers(elements.dims[dim])
    else:
        rows, positions = elements.dims[dim]
        row_B = _numbers((rows,)) * elements.microbatches + jnp.asarray(site.microbatch).astype(jnp.uint32)
        position_S = _numbers((positions,))
        if filled is not None and filled > position_S.shape[0]:
            more = jnp.arange(1, filled - position_S.shape[0] + 1, dtype=jnp.uint32)
            position_S = jnp.concatenate((position_S, position_S[-1] + more))
        found = (row_B[:, None] * stride_of(positions.size) + position_S[None]).ravel()
    # Of the keys of a ring, which are on another device in each step of it.
    return found if found.shape[0] == num else jnp.arange(num, dtype=jnp.uint32)


def _numbers(dims: Sequence[Tiled]) -> jax.Array:
    """The places of this device's elements in merged dims."""
    found = jnp.zeros(1, jnp.uint32)
    for dim in dims:
        num = len(dim.tiles) // size_of(dim.axes)
        tile = lax.dynamic_slice_in_dim(jnp.asarray(dim.tiles, jnp.uint32), index_of(dim.axes) * num, num)
        own = (tile[:, None] * dim.width + jnp.arange(dim.width, dtype=jnp.uint32)[None]).ravel()
        found = (found[:, None] * dim.size + own[None]).ravel()
    return found


def _bits(key: Key, row_N: jax.Array, elements: Elements, dim: Dim, num: int, group: jax.Array | None) -> jax.Array:
    """24 bits of each element, int32: NM, or with a group for each matrix ENM. ``group``: an expert for each row, or for each matrix."""
    column_M, even, total = jnp.arange(num, dtype=jnp.uint32), num % 2 == 0, num
    if (dims := elements.dims.get(dim)) is not None and prod(one.size for one in dims) % num == 0:
        own = _numbers(dims)
        if own.shape[0] == num:
            column_M, even, total = own, dims[-1].width % 2 == 0, prod(one.size for one in dims)
    # Two neighbours have one counter, and a word of its bits each.
    pair_P = (column_M[::2] if even else column_M) >> 1
    rows, pairs = row_N.astype(jnp.uint32)[:, None], pair_P[None]
    if group is not None:
        offset = _of_all(group, elements) * ((total + 1) // 2)
        if group.shape == row_N.shape:
            pairs = pairs + offset[:, None]
        else:
            rows, pairs = rows[None], pairs[None] + offset[:, None, None]
    first, second = threefry(key, rows, pairs)
    if even:
        bits = jnp.stack((first, second), axis=-1).reshape(*first.shape[:-1], num)
    else:
        bits = jnp.where(jnp.broadcast_to(column_M & 1, first.shape) == 1, second, first)
    return (bits >> (32 - ROUNDING_BITS)).astype(jnp.int32)


def _of_all(expert: jax.Array, elements: Elements) -> jax.Array:
    """The number of this device's part of each expert among those of all devices that have one."""
    first = 0
    if elements.experts is not None:
        first = index_of(elements.experts.axes) * (elements.experts.size // size_of(elements.experts.axes))
    number = (expert + first) * elements.num_sources + index_of(elements.sources)
    return number.astype(jnp.uint32)
