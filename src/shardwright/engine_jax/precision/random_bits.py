"""Random bits that are a function of a key and a counter: Threefry-2x32 of 20 rounds, which JAX has built in.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. It has only sums, shifts and exclusive ors of
32 bits, so every device computes the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

Words = tuple[jax.Array, jax.Array]
"""64 bits as two uint32."""


def threefry(key: Words, first: jax.Array, second: jax.Array) -> Words:
    """The bits of each counter, whose two words have one shape or broadcast. All are uint32."""
    first, second = jnp.broadcast_arrays(first, second)
    # One array of even size, whose halves are the words of the counters.
    bits = threefry_2x32(key, jnp.concatenate((first.ravel(), second.ravel())))
    x, y = jnp.split(bits, 2)
    return x.reshape(first.shape), y.reshape(first.shape)
