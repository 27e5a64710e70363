"""Rotary position embeddings (arXiv:2104.09864); frequencies and scalings come from the model's ``Rope``.

B rows, L tokens, H heads, D rotated elements, P = D / 2 pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed, kept
from shardwright.models.parts.rope import Rope


class Angles(NamedTuple):
    """Cosine and sine for each token and pair, in float32."""

    cos_BLP: jax.Array
    sin_BLP: jax.Array


def angles(rope: Rope, dim: int, positions_BL: jax.Array) -> Angles:
    """The rotation of tokens at the given positions of their documents."""
    frequencies_P = jnp.asarray(rope.inverse_frequencies(dim), jnp.float32)
    angle_BLP = positions_BL[..., None].astype(jnp.float32) * frequencies_P[None, None]
    return Angles(jnp.cos(angle_BLP) * rope.amplitude, jnp.sin(angle_BLP) * rope.amplitude)


def rotate(x_BLHD: jax.Array, rotation: Angles, interleaved: bool) -> jax.Array:
    """``x`` with each pair rotated. The result has the first elements of all pairs, then the second ones.

    So interleaved pairs do not stay interleaved, which does not change products of queries and keys that are both rotated here.
    """
    wide = x_BLHD.astype(computed("rotation", x_BLHD.dtype))
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    cos, sin = rotation.cos_BLP[:, :, None, :], rotation.sin_BLP[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(kept("rotation", x_BLHD.dtype))
