"""Operations on each element: sums, biases, factors and caps, and values side by side along their last dim."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add

import jax
import jax.numpy as jnp


def added(x: jax.Array, *others: jax.Array) -> jax.Array:
    """``x`` plus the sum of the others."""
    return x + reduce(add, others)


def with_bias(x: jax.Array, bias: jax.Array, dims: Sequence[int]) -> jax.Array:
    """``dims``: those of ``x`` that the bias has."""
    others = [dim for dim in range(x.ndim) if dim not in dims]
    return x + jnp.expand_dims(bias, others).astype(x.dtype)


def capped(x: jax.Array, limit: float) -> jax.Array:
    """Between ``-limit`` and ``limit``."""
    return limit * jnp.tanh(x / limit)


def split(x: jax.Array, widths: Sequence[int]) -> list[jax.Array]:
    """Runs of the last dim."""
    return jnp.split(x, list(accumulate(widths))[:-1], axis=-1)


def joined(parts: Sequence[jax.Array]) -> jax.Array:
    """One after the other along the last dim. A part without heads is that of all heads."""
    (first, *_) = (part.shape[:-1] for part in parts if part.ndim == max(part.ndim for part in parts))
    whole = [
        part if part.ndim > len(first) else jnp.broadcast_to(jnp.expand_dims(part, -2), (*first, part.shape[-1]))
        for part in parts
    ]
    return whole[0] if len(whole) == 1 else jnp.concatenate(whole, axis=-1)
