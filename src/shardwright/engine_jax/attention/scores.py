"""Softmax attention over the keys that a device has: which a query sees, and what it takes of their values.

Here are all scores at once, as short rows have them; ``blockwise`` does the same a block at a time.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept

UNSEEN = float(jnp.finfo(jnp.float32).min)
"""The score of a key that a query does not see. A query that sees none takes the mean of all values."""


class Reach(NamedTuple):
    """The places of the first and the last key that a query sees, among all keys, int32."""

    first_BT: jax.Array
    last_BT: jax.Array


class AttentionMask(NamedTuple):
    """What decides which keys a query sees: those of its own document (segment), not later than itself.

    ``reach``: for the one kernel that must be told; where keys lie in the order of the text, the keys of a query are
    those of its document up to its last one.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array
    kv_positions_BS: jax.Array
    kv_segments_BS: jax.Array
    reach: Reach | None = None

    def visible(self) -> jax.Array:
        """Whether a query sees a key, BTS; TS where the arrays are of one row."""
        same_BTS = self.segments_BT[..., :, None] == self.kv_segments_BS[..., None, :]
        return same_BTS & (self.positions_BT[..., :, None] >= self.kv_positions_BS[..., None, :])

    def with_reach(self) -> AttentionMask:
        """A query that sees no key reaches all, so that what it takes is a number."""
        visible_BTS, num = self.visible(), self.kv_positions_BS.shape[-1]
        key_11S = jnp.arange(num, dtype=jnp.int32)[None, None]
        first_BT = jnp.min(jnp.where(visible_BTS, key_11S, num), axis=-1)
        last_BT = jnp.max(jnp.where(visible_BTS, key_11S, -1), axis=-1)
        blind_BT = last_BT < 0
        return self._replace(reach=Reach(jnp.where(blind_BT, 0, first_BT), jnp.where(blind_BT, num - 1, last_BT)))


class Running(NamedTuple):
    """Attention to some of the keys: the largest score, and sums of e to the score less that largest one.

    No gradient goes through ``largest``: whatever is taken off all scores of a query leaves its shares as they are.
    """

    largest_BKGT: jax.Array
    weight_BKGT: jax.Array
    sum_BKGTE: jax.Array


def scores_of(q_BTHD: jax.Array, k_BSKD: jax.Array, mask: AttentionMask, scale: float) -> jax.Array:
    """Products of queries and keys, BKGTS; the least number there is where a query does not see a key.

    Queries of head ``h`` meet KV head ``h // (H / K)``.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    wide = computed("scores", q_BTHD.dtype)
    scores_BKGTS = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=wide) * scale
    scores_BKGTS = jnp.where(mask.visible()[:, None, None], scores_BKGTS, UNSEEN)
    return scores_BKGTS.astype(kept("scores", q_BTHD.dtype))


def attend(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float) -> jax.Array:
    """Softmax attention, BTHE."""
    return finished(with_keys(None, q_BTHD, k_BSKD, v_BSKE, mask, scale), q_BTHD.dtype)


def with_keys(
    before: Running | None, q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float
) -> Running:
    """Attention to these keys and to all ``before``."""
    scores_BKGTS = scores_of(q_BTHD, k_BSKD, mask, scale)
    largest_BKGT = jax.lax.stop_gradient(jnp.max(scores_BKGTS, axis=-1))
    if before is not None:
        largest_BKGT = jnp.maximum(before.largest_BKGT, largest_BKGT)
    probs_BKGTS = jnp.exp(scores_BKGTS - largest_BKGT[..., None])
    weight_BKGT = jnp.sum(probs_BKGTS, axis=-1)
    narrow, wide = kept("probabilities", v_BSKE.dtype), computed("attention", v_BSKE.dtype)
    sum_BKGTE = jnp.einsum("BKGTS,BSKE->BKGTE", probs_BKGTS.astype(narrow), v_BSKE, preferred_element_type=wide)
    if before is not None:
        kept_BKGT = jnp.exp(before.largest_BKGT - largest_BKGT)
        weight_BKGT = before.weight_BKGT * kept_BKGT + weight_BKGT
        sum_BKGTE = before.sum_BKGTE * kept_BKGT[..., None] + sum_BKGTE
    return Running(largest_BKGT, weight_BKGT, sum_BKGTE)


def finished(running: Running, dtype: jnp.dtype) -> jax.Array:
    """What queries take of all keys that were run through, BTHE. ``dtype``: that of the computation."""
    out_BKGTE = running.sum_BKGTE / running.weight_BKGT[..., None]
    B, K, G, T, E = out_BKGTE.shape
    return jnp.moveaxis(out_BKGTE, 3, 1).reshape(B, T, K * G, E).astype(kept("attention", dtype))
