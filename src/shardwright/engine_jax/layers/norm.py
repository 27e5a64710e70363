"""RMS normalization (arXiv:1910.07467)."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """``x`` over its root mean square along the last dim, times ``scale``. Only these two are saved for the backward pass."""
    return _saving_operands(x, scale, eps)


def _normalized(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(computed("norm", x.dtype))
    mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = jnp.expand_dims(scale.astype(wide.dtype), range(x.ndim - 1))
    return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(kept("norm", x.dtype))


def _backward(eps: float, given: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, pull = jax.vjp(partial(_normalized, eps=eps), *given)
    return pull(cotangent)


_saving_operands: Any = jax.custom_vjp(_normalized, nondiff_argnums=(2,))
_saving_operands.defvjp(lambda x, scale, eps: (_normalized(x, scale, eps), (x, scale)), _backward)
