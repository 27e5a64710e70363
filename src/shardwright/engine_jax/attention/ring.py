"""Ring attention: each device sends its shard of keys to the next one, until every device had every shard.

Ring attention (arXiv:2310.01889) with the online softmax of arXiv:1805.02867, section 3: one shard of the keys after the
other, with a running maximum. Devices send keys and values, or the latent from which each device computes them.

B rows, T tokens of queries, S tokens of one shard of keys, H heads, K KV heads, G = H / K, D head dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.engine_jax.attention.blockwise import accumulate_attention_in_blocks
from shardwright.engine_jax.attention.scores import AttentionMask, accumulate_attention, normalized
from shardwright.engine_jax.io.layer_io import Ring, index_of
from shardwright.engine_jax.io.redistribute import passed_on

KeysAndValues = Callable[[Any, int], tuple[jax.Array, jax.Array]]
"""From a shard of what devices send, and the number of shards that this device had before."""


def ring_attention(
    q_BTHD: jax.Array,
    held: tuple[jax.Array, ...],
    names: tuple[str, ...],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    ring: Ring,
    block: int | None = None,
) -> jax.Array:
    """Softmax attention of this device's queries to the keys of all devices of the ring, BTHE.

    ``held``: the shard that this device sends, one array or several, and ``names`` under which policies of recomputation keep those that
    it has; ``keys_and_values`` computes BSKD and BSKE from it.
    ``mask`` has the positions and segments of the full row of keys: they are small, and known before the first layer.
    ``block``: the tokens of a block of scores; None: a device computes the scores of a shard at once.

    JAX differentiates the permutes, which is exact: the transpose sends a cotangent in the reverse direction, and each device
    adds its summand. So a backward pass has as many permutes as a forward pass.
    """
    num, own = len(ring.numbers), index_of(ring.axes)
    softmax = None
    for step in range(num):
        if step:
            held = tuple(passed_on(shard, ring) for shard in held)
        held = tuple(checkpoint_name(shard, name) for shard, name in zip(held, names, strict=True))
        k_BSKD, v_BSKE = keys_and_values(held, step)
        visible = _mask_of_shard(mask, (own - step) % num, num)
        if block is None:
            softmax = accumulate_attention(softmax, q_BTHD, k_BSKD, v_BSKE, visible, scale)
        else:
            softmax = accumulate_attention_in_blocks(softmax, q_BTHD, k_BSKD, v_BSKE, visible, scale, block)
    assert softmax is not None
    return normalized(softmax, q_BTHD.dtype)


def _mask_of_shard(mask: AttentionMask, source: jax.Array | int, num: int) -> AttentionMask:
    """The mask of this device's queries and the keys of device ``source`` of ``num``."""
    size = mask.kv_positions_BS.shape[1] // num

    def shard(array_BS: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(array_BS, source * size, size, axis=1)

    return mask._replace(kv_positions_BS=shard(mask.kv_positions_BS), kv_segments_BS=shard(mask.kv_segments_BS))
