"""Rows of documents for the tests of attention, and a reference attention in NumPy and float64.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.engine_jax.attention.scores import AttentionMask

Attend = Callable[[jax.Array, jax.Array, jax.Array, AttentionMask, float], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a case. ``places``: which of a row's tokens are queries; None: all."""

    rows: int
    keys: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    places: tuple[int, ...] | None = None
    dtype: str = "float32"

    @property
    def num_queries(self) -> int:
        return self.keys if self.places is None else len(self.places)


class Made(NamedTuple):
    """Operands of attention, and the cotangent of its output."""

    q_BTHD: jax.Array
    k_BSKD: jax.Array
    v_BSKE: jax.Array
    mask: AttentionMask
    d_out_BTHE: jax.Array


def documents(rng: np.random.Generator, rows: int, length: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions and segments of rows of ``num`` documents of random lengths. The last one is padding."""
    positions, segments = np.zeros((rows, length), np.int32), np.zeros((rows, length), np.int32)
    for row in range(rows):
        starts = [0, *sorted(rng.choice(np.arange(1, length), num - 1, replace=False)), length]
        for number, (start, stop) in enumerate(pairwise(starts), 1):
            positions[row, start:stop] = np.arange(stop - start)
            segments[row, start:stop] = number if number < num else 0
    return positions, segments


def made(shape: Shape, *, seed: int = 0, num_documents: int = 4, shuffled: bool = False) -> Made:
    """``shuffled``: the tokens of a row are in random order, with their positions and segments."""
    rng = np.random.default_rng(seed)
    positions_BS, segments_BS = documents(rng, shape.rows, shape.keys, num_documents)
    if shuffled:
        order = rng.permutation(shape.keys)
        positions_BS, segments_BS = positions_BS[:, order], segments_BS[:, order]
    places = list(range(shape.keys)) if shape.places is None else list(shape.places)

    def normal(*sizes: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=sizes), shape.dtype)

    tokens = (shape.rows, shape.num_queries, shape.heads)
    return Made(
        q_BTHD=normal(*tokens, shape.width),
        k_BSKD=normal(shape.rows, shape.keys, shape.kv_heads, shape.width),
        v_BSKE=normal(shape.rows, shape.keys, shape.kv_heads, shape.value_width),
        mask=AttentionMask(
            jnp.asarray(positions_BS[:, places]),
            jnp.asarray(segments_BS[:, places]),
            jnp.asarray(positions_BS),
            jnp.asarray(segments_BS),
        ),
        d_out_BTHE=normal(*tokens, shape.value_width),
    )


def with_cotangents(attend: Attend, made: Made, scale: float) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The output of an attention, and the cotangents of queries, keys and values."""
    return _compiled(attend, scale)(made)


@cache
def _compiled(attend: Attend, scale: float) -> Callable[[Made], tuple[jax.Array, tuple[jax.Array, ...]]]:
    """One function for all cases, so that cases of one shape share a compilation."""

    @jax.jit
    def run(made: Made) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        out_BTHE, pull = jax.vjp(lambda q, k, v: attend(q, k, v, made.mask, scale), *made[:3])
        return out_BTHE, pull(made.d_out_BTHE.astype(out_BTHE.dtype))

    return run


def reference_attention(made: Made, scale: float) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """The same by the definition, in NumPy and float64; the cotangents by the rules of products and of softmax.

    The output of a fully masked query is the mean of all values.
    """
    q, k, v, d_out = (np.asarray(array, np.float64) for array in (*made[:3], made.d_out_BTHE))
    sharing = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, sharing, axis=2), np.repeat(v, sharing, axis=2)
    positions_T, segments_T, positions_S, segments_S = (np.asarray(array) for array in made.mask[:4])
    visible = (segments_T[:, :, None] == segments_S[:, None]) & (positions_T[:, :, None] >= positions_S[:, None])
    scores = np.where(visible[:, None], np.einsum("bthd,bshd->bhts", q, k) * scale, -1e300)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    d_probs = np.einsum("bthe,bshe->bhts", d_out, v)
    d_scores = probs * (d_probs - (probs * d_probs).sum(-1, keepdims=True)) * visible[:, None] * scale
    by_kv_head = (*k.shape[:2], -1, sharing)
    return np.einsum("bhts,bshe->bthe", probs, v), (
        np.einsum("bhts,bshd->bthd", d_scores, k),
        np.einsum("bhts,bthd->bshd", d_scores, q).reshape(*by_kv_head, k.shape[-1]).sum(3),
        np.einsum("bhts,bthe->bshe", probs, d_out).reshape(*by_kv_head, v.shape[-1]).sum(3),
    )


def far(ours, expected) -> float:
    """The largest relative distance of the arrays of two trees: norm of the difference over norm of the expected array."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(expected), strict=True)
    return max(
        float(np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(np.asarray(b, np.float64)))
        for a, b in pairs
    )
