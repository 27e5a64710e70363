"""RMS normalisation (arXiv:1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x`` over its root mean square along the last dim, times ``scale``: in float32, given back in x's dtype."""
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale.astype(jnp.float32), range(x.ndim - 1))
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)
