"""Softmax attention over the keys of a device: the attention mask, and the weighted sum of values.

This file computes all scores at once, for short rows; ``blockwise`` does the same a block at a time.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept

MASKED_SCORE = float(jnp.finfo(jnp.float32).min)
"""The score of a masked key. The output of a fully masked query is the mean of all values."""


class VisibleRange(NamedTuple):
    """The places of the first and the last key that a query attends to, among all keys, int32."""

    first_BT: jax.Array
    last_BT: jax.Array


class AttentionMask(NamedTuple):
    """Which keys a query attends to: those of its own document (segment) that are not later than itself.

    ``visible_range``: for the one kernel that needs it. It gives the same mask with ``segments`` if the keys are in the order
    of the text: a query attends to the keys of its document up to the last of its range.
    """

    positions_BT: jax.Array
    segments_BT: jax.Array
    kv_positions_BS: jax.Array
    kv_segments_BS: jax.Array
    visible_range: VisibleRange | None = None

    def visible(self) -> jax.Array:
        """Whether a query attends to a key, BTS; TS if the arrays are of one row."""
        same_BTS = self.segments_BT[..., :, None] == self.kv_segments_BS[..., None, :]
        return same_BTS & (self.positions_BT[..., :, None] >= self.kv_positions_BS[..., None, :])

    def with_visible_range(self) -> AttentionMask:
        """The mask with a range for each query. For a fully masked query it is that of all keys, so that its output is finite."""
        visible_BTS, num = self.visible(), self.kv_positions_BS.shape[-1]
        key_11S = jnp.arange(num, dtype=jnp.int32)[None, None]
        first_BT = jnp.min(jnp.where(visible_BTS, key_11S, num), axis=-1)
        last_BT = jnp.max(jnp.where(visible_BTS, key_11S, -1), axis=-1)
        masked_BT = last_BT < 0
        return self._replace(
            visible_range=VisibleRange(jnp.where(masked_BT, 0, first_BT), jnp.where(masked_BT, num - 1, last_BT))
        )


class OnlineSoftmax(NamedTuple):
    """Attention to some of the keys: the maximum score, and sums of exp(score - maximum), alone and times the values.

    No gradient goes through ``max``: subtracting one number from all scores of a query does not change its probabilities.
    """

    max_BKGT: jax.Array
    normalizer_BKGT: jax.Array
    sum_BKGTE: jax.Array


def scores_of(q_BTHD: jax.Array, k_BSKD: jax.Array, mask: AttentionMask, scale: float) -> jax.Array:
    """Scaled products of queries and keys, BKGTS; ``MASKED_SCORE`` for masked keys.

    Queries of head ``h`` attend to KV head ``h // (H / K)``.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    wide = computed("scores", q_BTHD.dtype)
    scores_BKGTS = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=wide) * scale
    scores_BKGTS = jnp.where(mask.visible()[:, None, None], scores_BKGTS, MASKED_SCORE)
    return scores_BKGTS.astype(kept("scores", q_BTHD.dtype))


def attend(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float) -> jax.Array:
    """Softmax attention, BTHE."""
    return normalized(accumulate_attention(None, q_BTHD, k_BSKD, v_BSKE, mask, scale), q_BTHD.dtype)


def accumulate_attention(
    before: OnlineSoftmax | None,
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKE: jax.Array,
    mask: AttentionMask,
    scale: float,
) -> OnlineSoftmax:
    """Attention to these keys and to all those of ``before``."""
    scores_BKGTS = scores_of(q_BTHD, k_BSKD, mask, scale)
    max_BKGT = jax.lax.stop_gradient(jnp.max(scores_BKGTS, axis=-1))
    if before is not None:
        max_BKGT = jnp.maximum(before.max_BKGT, max_BKGT)
    probs_BKGTS = jnp.exp(scores_BKGTS - max_BKGT[..., None])
    normalizer_BKGT = jnp.sum(probs_BKGTS, axis=-1)
    narrow, wide = kept("probabilities", v_BSKE.dtype), computed("attention", v_BSKE.dtype)
    sum_BKGTE = jnp.einsum("BKGTS,BSKE->BKGTE", probs_BKGTS.astype(narrow), v_BSKE, preferred_element_type=wide)
    if before is not None:
        rescale_BKGT = jnp.exp(before.max_BKGT - max_BKGT)
        normalizer_BKGT = before.normalizer_BKGT * rescale_BKGT + normalizer_BKGT
        sum_BKGTE = before.sum_BKGTE * rescale_BKGT[..., None] + sum_BKGTE
    return OnlineSoftmax(max_BKGT, normalizer_BKGT, sum_BKGTE)


def normalized(softmax: OnlineSoftmax, dtype: jnp.dtype) -> jax.Array:
    """The output of attention over all keys so far, BTHE. ``dtype``: that of the computation."""
    out_BKGTE = softmax.sum_BKGTE / softmax.normalizer_BKGT[..., None]
    B, K, G, T, E = out_BKGTE.shape
    return jnp.moveaxis(out_BKGTE, 3, 1).reshape(B, T, K * G, E).astype(kept("attention", dtype))
