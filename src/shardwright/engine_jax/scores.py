"""Softmax attention over the keys that a device has: which a query sees, and what it takes of their values.

B rows, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sight(NamedTuple):
    """What decides which keys a query sees: those of its own document (segment), not later than itself."""

    positions_BT: jax.Array
    segments_BT: jax.Array
    kv_positions_BS: jax.Array
    kv_segments_BS: jax.Array

    def visible(self) -> jax.Array:
        """Whether a query sees a key, BTS."""
        same_BTS = self.segments_BT[:, :, None] == self.kv_segments_BS[:, None, :]
        return same_BTS & (self.positions_BT[:, :, None] >= self.kv_positions_BS[:, None, :])


def scores_of(q_BTHD: jax.Array, k_BSKD: jax.Array, sight: Sight, scale: float) -> jax.Array:
    """Products of queries and keys in float32, BKGTS; the least number there is where a query does not see a key.

    Queries of head ``h`` meet KV head ``h // (H / K)``.
    """
    B, T, H, D = q_BTHD.shape
    K = k_BSKD.shape[2]
    q_BTKGD = q_BTHD.reshape(B, T, K, H // K, D)
    scores_BKGTS = jnp.einsum("BTKGD,BSKD->BKGTS", q_BTKGD, k_BSKD, preferred_element_type=jnp.float32) * scale
    return jnp.where(sight.visible()[:, None, None], scores_BKGTS, jnp.finfo(jnp.float32).min)


def attend(q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, sight: Sight, scale: float) -> jax.Array:
    """Softmax attention, BTHE; scores and softmax in float32. A kernel can stand in for this one function."""
    shares_BKGTS = jax.nn.softmax(scores_of(q_BTHD, k_BSKD, sight, scale), axis=-1).astype(v_BSKE.dtype)
    out_BTKGE = jnp.einsum("BKGTS,BSKE->BTKGE", shares_BKGTS, v_BSKE)
    return out_BTKGE.reshape(*q_BTHD.shape[:3], v_BSKE.shape[-1])
