"""Attention to keys that travel: each device passes what it holds on to the next, until all queries have met all keys.

Ring attention (arXiv:2310.01889), with the softmax of arXiv:1805.02867, section 3: one piece of the keys after the other,
with a running maximum. What travels is keys and values, or the latent of which each device makes them.

B rows, T tokens as queries, S tokens of one piece as keys, H heads, K KV heads, G = H / K, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from shardwright.engine_jax.attention.blockwise import with_keys_in_blocks
from shardwright.engine_jax.attention.scores import AttentionMask, finished, with_keys
from shardwright.engine_jax.io.layer_io import Ring, index_of
from shardwright.engine_jax.io.redistribute import passed_on

KeysAndValues = Callable[[Any], tuple[jax.Array, jax.Array]]


def attend_around(
    q_BTHD: jax.Array,
    held: Any,
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    ring: Ring,
    block: int | None = None,
) -> jax.Array:
    """Softmax attention of this device's queries to the keys of all devices of the ring, BTHE.

    ``held``: what this device passes on, an array or several; ``keys_and_values`` makes BSKD and BSKE of it.
    ``mask`` has the positions and segments of the whole row of keys: they are small, and known before the first layer.
    ``block``: of how many tokens a device makes scores at once; None: of a piece.

    JAX differentiates the passing on, which is exact: its transpose passes a gradient the other way, and on its way each
    device adds its part. So a backward pass takes as many steps as a forward pass.
    """
    num, own = len(ring.numbers), index_of(ring.axes)
    running = None
    for step in range(num):
        if step:
            held = jax.tree.map(lambda part: passed_on(part, ring), held)
        k_BSKD, v_BSKE = keys_and_values(held)
        seen = _piece(mask, (own - step) % num, num)
        if block is None:
            running = with_keys(running, q_BTHD, k_BSKD, v_BSKE, seen, scale)
        else:
            running = with_keys_in_blocks(running, q_BTHD, k_BSKD, v_BSKE, seen, scale, block)
    assert running is not None
    return finished(running, q_BTHD.dtype)


def _piece(mask: AttentionMask, source: jax.Array | int, num: int) -> AttentionMask:
    """What queries see of the keys that came from one device."""
    size = mask.kv_positions_BS.shape[1] // num

    def part(array_BS: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array_BS, source * size, size, axis=1)

    return mask._replace(kv_positions_BS=part(mask.kv_positions_BS), kv_segments_BS=part(mask.kv_segments_BS))
