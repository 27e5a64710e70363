"""Cross-entropy over the valid tokens of the whole global step.

B rows, L tokens, V vocabulary entries.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def summed_cross_entropy(logits_BLV: jax.Array, targets_BL: jax.Array, valid_BL: jax.Array) -> jax.Array:
    """Sum over valid tokens of minus the log-probability of the target, in float32.

    The target's logit is picked by comparison, not by index: a vocabulary that is cut is never gathered.
    """
    logits_BLV = logits_BLV.astype(jnp.float32)
    largest_BL = jax.lax.stop_gradient(jnp.max(logits_BLV, axis=-1))
    shifted_BLV = logits_BLV - largest_BL[..., None]
    log_sum_BL = jnp.log(jnp.sum(jnp.exp(shifted_BLV), axis=-1))
    entries_V = jax.lax.broadcasted_iota(jnp.int32, shifted_BLV.shape, 2)
    target_BL = jnp.sum(jnp.where(entries_V == targets_BL[..., None], shifted_BLV, 0.0), axis=-1)
    return jnp.sum(jnp.where(valid_BL, log_sum_BL - target_BL, 0.0))
