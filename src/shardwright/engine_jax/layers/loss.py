"""Cross-entropy of a device's own tokens, over a vocabulary that may be sharded.

B rows, L tokens, V vocabulary entries of this device.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import index_of


def summed_cross_entropy(
    logits_BLV: jax.Array, targets_BL: jax.Array, valid_BL: jax.Array, axes: tuple[str, ...] = ()
) -> jax.Array:
    """Sum over the valid tokens of minus the log-probability of the target.

    ``axes``: the axes that shard the vocabulary; the result is the same on all their devices. The target's logit is
    selected by comparison, not by index, so that a sharded vocabulary is never gathered.
    """
    return _summed(axes, logits_BLV, targets_BL, valid_BL)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(axes: tuple[str, ...], logits_BLV: jax.Array, targets_BL: jax.Array, valid_BL: jax.Array) -> jax.Array:
    return _forward(axes, logits_BLV, targets_BL, valid_BL)[0]


def _forward(axes, logits_BLV, targets_BL, valid_BL):
    unconverted_BLV, logits_BLV = logits_BLV, logits_BLV.astype(computed("loss", logits_BLV.dtype))
    largest_BL = jnp.max(logits_BLV, axis=-1)
    largest_BL = jax.lax.pmax(largest_BL, axes) if axes else largest_BL
    sums_BL = jnp.sum(jnp.exp(logits_BLV - largest_BL[..., None]), axis=-1)
    target_BL = jnp.sum(jnp.where(_is_target(logits_BLV, targets_BL, axes), logits_BLV, 0.0), axis=-1)
    if axes:
        sums_BL, target_BL = jax.lax.psum((sums_BL, target_BL), axes)
    log_sum_BL = jnp.log(sums_BL) + largest_BL
    loss = jnp.sum(jnp.where(valid_BL, log_sum_BL - target_BL, 0.0))
    return loss, (unconverted_BLV, log_sum_BL, targets_BL, valid_BL)


def _backward(axes, residuals, cotangent):
    logits_BLV, log_sum_BL, targets_BL, valid_BL = residuals
    probs_BLV = jnp.exp(logits_BLV.astype(log_sum_BL.dtype) - log_sum_BL[..., None])
    cotangent_BLV = probs_BLV - _is_target(logits_BLV, targets_BL, axes)
    cotangent_BLV = jnp.where(valid_BL, cotangent, 0.0)[..., None] * cotangent_BLV
    return cotangent_BLV.astype(logits_BLV.dtype), None, None


def _is_target(logits_BLV: jax.Array, targets_BL: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    V = logits_BLV.shape[-1]
    entries_V = jax.lax.broadcasted_iota(jnp.int32, (1, 1, V), 2) + index_of(axes) * V
    return entries_V == targets_BL[..., None]


_summed.defvjp(_forward, _backward)
