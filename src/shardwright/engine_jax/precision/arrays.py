"""JAX's functions for the core's formula of quantizers (``core/recipes/formula.py``)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.arrays import Arrays


def _quotient(x: Any, y: Any) -> jax.Array:
    # A compiler may multiply by the reciprocal of a constant or of what is broadcast, and join quotients of quotients; each rounds
    # differently. XLA expands barriers before its last simplifications. So the divisor is one of each element, NaN for NaN, which
    # changes no quotient.
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)
    x, y = lax.optimization_barrier((x, jnp.where(x == x, y, jnp.nan)))
    return lax.optimization_barrier(jnp.divide(x, y))


def _padded(x: jax.Array, dim: int, size: int) -> jax.Array:
    return jnp.pad(x, [(0, size - x.shape[dim] if each == dim else 0) for each in range(x.ndim)])


ARRAYS = Arrays(
    float32=lambda x: x.astype(jnp.float32),
    int32=lambda x: x.astype(jnp.int32),
    bits=lambda x: lax.bitcast_convert_type(x, jnp.int32),
    of_bits=lambda x: lax.bitcast_convert_type(x, jnp.float32),
    quotient=_quotient,
    least=jnp.minimum,
    most=jnp.maximum,
    where=jnp.where,
    largest=lambda x, dims: jnp.max(x, axis=dims, keepdims=True, initial=None if x.size else 0),
    reshape=jnp.reshape,
    padded=_padded,
    first=lambda x, dim, size: lax.slice_in_dim(x, 0, size, axis=dim),
    joined=lambda x, y: jnp.concatenate((x, y), axis=-1),
    cast=lambda x, dtype: x.astype(jnp.dtype(dtype)),
    bytes_of=lambda x: lax.bitcast_convert_type(x, jnp.uint8),
    as_bytes=lambda x: x.astype(jnp.uint8),
    as_codes=lambda x, dtype: lax.bitcast_convert_type(x, jnp.dtype(dtype)),
    in_rows=lambda _: True,
    fused=lambda function: function,
)
