"""Attention to keys that travel: each device passes what it holds on to the next, until all queries have met all keys.

Ring attention (arXiv:2310.01889), with the softmax of arXiv:1805.02867, section 3: one piece of the keys after the other,
with a running maximum. What travels is keys and values, or the latent of which each device makes them.

B rows, T tokens as queries, S tokens of one piece as keys, H heads, K KV heads, G = H / K, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import index_of, size_of
from shardwright.engine_jax.scores import Sight, scores_of

KeysAndValues = Callable[[Any], tuple[jax.Array, jax.Array]]


class _Running(NamedTuple):
    """Attention to the pieces so far, in float32: the largest score, and sums of e to the score less that largest one."""

    largest_BKGT: jax.Array
    weight_BKGT: jax.Array
    sum_BKGTE: jax.Array


def attend_around(
    q_BTHD: jax.Array,
    held: Any,
    keys_and_values: KeysAndValues,
    sight: Sight,
    scale: float,
    axes: tuple[str, ...],
) -> jax.Array:
    """Softmax attention of this device's queries to the keys of all devices along ``axes``, BTHE.

    ``held``: what this device passes on, an array or several; ``keys_and_values`` makes BSKD and BSKE of it.
    ``sight`` has the positions and segments of the whole row of keys: they are small, and known before the first layer.

    JAX differentiates the passing on, which is exact: its transpose passes a gradient the other way, and on its way each
    device adds its part. So a backward pass takes as many steps as a forward pass.
    """
    num, own = size_of(axes), index_of(axes)
    onward = [(device, (device + 1) % num) for device in range(num)]
    running = None
    for step in range(num):
        if step:
            held = jax.tree.map(lambda part: jax.lax.ppermute(part, axes, onward), held)
        k_BSKD, v_BSKE = keys_and_values(held)
        scores_BKGTS = scores_of(q_BTHD, k_BSKD, _piece(sight, (own - step) % num, num), scale)
        running = _with_piece(running, scores_BKGTS, v_BSKE)
    assert running is not None
    out_BKGTE = running.sum_BKGTE / running.weight_BKGT[..., None]
    out_BTHE = jnp.moveaxis(out_BKGTE, 3, 1).reshape(*q_BTHD.shape[:3], out_BKGTE.shape[-1])
    return out_BTHE.astype(q_BTHD.dtype)


def _with_piece(running: _Running | None, scores_BKGTS: jax.Array, v_BSKE: jax.Array) -> _Running:
    # Whatever is taken off all scores of a query leaves its shares as they are: there is no gradient through it.
    largest_BKGT = jax.lax.stop_gradient(jnp.max(scores_BKGTS, axis=-1))
    if running is not None:
        largest_BKGT = jnp.maximum(running.largest_BKGT, largest_BKGT)
    shares_BKGTS = jnp.exp(scores_BKGTS - largest_BKGT[..., None])
    weight_BKGT = jnp.sum(shares_BKGTS, axis=-1)
    sum_BKGTE = jnp.einsum(
        "BKGTS,BSKE->BKGTE", shares_BKGTS.astype(v_BSKE.dtype), v_BSKE, preferred_element_type=jnp.float32
    )
    if running is not None:
        before_BKGT = jnp.exp(running.largest_BKGT - largest_BKGT)
        weight_BKGT = running.weight_BKGT * before_BKGT + weight_BKGT
        sum_BKGTE = running.sum_BKGTE * before_BKGT[..., None] + sum_BKGTE
    return _Running(largest_BKGT, weight_BKGT, sum_BKGTE)


def _piece(sight: Sight, source: jax.Array | int, num: int) -> Sight:
    """What queries see of the keys that came from one device."""
    size = sight.kv_positions_BS.shape[1] // num

    def part(array_BS: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array_BS, source * size, size, axis=1)

    return sight._replace(kv_positions_BS=part(sight.kv_positions_BS), kv_segments_BS=part(sight.kv_segments_BS))
