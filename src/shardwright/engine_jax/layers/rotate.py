"""Rotary position embeddings (arXiv:2104.09864); frequencies and scalings come from the operation.

B rows, L tokens, H heads, D rotated elements, P = D / 2 pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept


class Angles(NamedTuple):
    """Cosine and sine for each token and pair, in float32."""

    cos_BLP: jax.Array
    sin_BLP: jax.Array


def angles(rope: Any, dim: int, positions_BL: jax.Array) -> Angles:
    """The rotation of tokens at the given positions of their documents. ``rope``: with inverse frequencies and an amplitude."""
    frequencies_P = jnp.asarray(rope.inverse_frequencies(dim), jnp.float32)
    angle_BLP = positions_BL[..., None].astype(jnp.float32) * frequencies_P[None, None]
    return Angles(jnp.cos(angle_BLP) * rope.amplitude, jnp.sin(angle_BLP) * rope.amplitude)


def rotate(x: jax.Array, rotation: Angles, interleaved: bool) -> jax.Array:
    """``x``, BLHD or BLD, with each pair rotated. The result has the first elements of all pairs, then the second ones.

    So interleaved pairs do not stay interleaved, which does not change products of queries and keys that are both rotated here.
    """
    x_BLHD = x if x.ndim == 4 else x[:, :, None]
    wide = x_BLHD.astype(computed("rotation", x.dtype))
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = rotation.cos_BLP[:, :, None, :], rotation.sin_BLP[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(kept("rotation", x.dtype))
    return rotated if x.ndim == 4 else rotated[:, :, 0]
