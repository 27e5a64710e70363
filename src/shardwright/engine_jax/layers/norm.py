"""RMS normalization (arXiv:1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x`` over its root mean square along the last dim, times ``scale``."""
    wide = x.astype(computed("norm", x.dtype))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale.astype(wide.dtype), range(x.ndim - 1))
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(kept("norm", x.dtype))
