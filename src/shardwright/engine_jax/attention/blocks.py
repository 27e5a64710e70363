"""A row of attention in blocks of tokens: where each block begins, and the mask between a block of queries and a block of keys.

T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim, E value dim, X any of these; t and s are the
tokens of one block. Arrays are of one row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.engine_jax.attention.scores import AttentionMask


class Blocks(NamedTuple):
    """``length`` tokens in ``number`` blocks of ``size``. If they are not a multiple of it, the last block begins earlier."""

    length: int
    size: int
    number: int

    @staticmethod
    def of(length: int, largest: int) -> Blocks:
        """
        >>> Blocks.of(1024, 512), Blocks.of(1025, 512)
        (Blocks(length=1024, size=512, number=2), Blocks(length=1025, size=342, number=3))
        """
        number = -(-length // largest)
        return Blocks(length, -(-length // number), number)

    @property
    def overlap(self) -> bool:
        return self.size * self.number > self.length

    def start(self, block: jax.Array) -> jax.Array:
        return jnp.minimum(block * self.size, self.length - self.size)

    def is_new(self, block: jax.Array) -> jax.Array:
        """Which tokens of a block are in no earlier block."""
        return self.start(block) + jnp.arange(self.size) >= block * self.size

    def take(self, array: jax.Array, block: jax.Array, dim: int) -> jax.Array:
        return lax.dynamic_slice_in_dim(array, self.start(block), self.size, dim)

    def put(self, array: jax.Array, into: jax.Array, block: jax.Array, dim: int) -> jax.Array:
        """Write a block into ``into``. Tokens that an earlier block has are not overwritten."""
        array = array.astype(into.dtype)
        if self.overlap:
            others = (axis for axis in range(array.ndim) if axis != dim)
            is_new = jnp.expand_dims(self.is_new(block), tuple(others))
            array = jnp.where(is_new, array, self.take(into, block, dim))
        return lax.dynamic_update_slice_in_dim(into, array, self.start(block), dim)


class Row(NamedTuple):
    """One row: queries, keys and values by KV head, their attention mask and their blocks."""

    q_KGTD: jax.Array
    k_KSD: jax.Array
    v_KSE: jax.Array
    mask: AttentionMask
    queries: Blocks
    keys: Blocks

    @staticmethod
    def of(block: int, q_THD: jax.Array, k_SKD: jax.Array, v_SKE: jax.Array, mask: AttentionMask) -> Row:
        return Row(
            q_KGTD=by_kv_head(q_THD, k_SKD.shape[1]),
            k_KSD=jnp.moveaxis(k_SKD, 0, 1),
            v_KSE=jnp.moveaxis(v_SKE, 0, 1),
            mask=mask,
            queries=Blocks.of(q_THD.shape[0], block),
            keys=Blocks.of(k_SKD.shape[0], block),
        )

    def visible(self, of_q: jax.Array, of_kv: jax.Array) -> jax.Array:
        """Whether a query of a block attends to a key of a block, ts. A token in two blocks counts in the first of them."""
        queries, keys, mask = self.queries, self.keys, self.mask
        positions_t, segments_t = (queries.take(a, of_q, 0) for a in (mask.positions_BT, mask.segments_BT))
        positions_s, segments_s = (keys.take(a, of_kv, 0) for a in (mask.kv_positions_BS, mask.kv_segments_BS))
        visible_ts = AttentionMask(positions_t, segments_t, positions_s, segments_s).visible()
        if queries.overlap:
            visible_ts &= queries.is_new(of_q)[:, None]
        if keys.overlap:
            visible_ts &= keys.is_new(of_kv)[None, :]
        return visible_ts


def by_kv_head(array_THX: jax.Array, num_kv_heads: int) -> jax.Array:
    """THX to KGTX."""
    T, H, X = array_THX.shape
    return jnp.moveaxis(array_THX.reshape(T, num_kv_heads, H // num_kv_heads, X), 0, 2)


def by_token(array_KGTX: jax.Array) -> jax.Array:
    """KGTX to THX."""
    K, G, T, X = array_KGTX.shape
    return jnp.moveaxis(array_KGTX, 2, 0).reshape(T, K * G, X)
