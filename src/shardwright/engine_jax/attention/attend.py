"""Attention of a device's queries to keys and values, by the kernel that the plan chose, or around a ring.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim. All are sizes on one device.
"""

from __future__ import annotations

from math import gcd

import jax
import jax.numpy as jnp

from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_jax.attention.blockwise import attend_in_blocks
from shardwright.engine_jax.attention.kernels import cudnn, splash, triton
from shardwright.engine_jax.attention.ring import KeysAndValues, ring_attention
from shardwright.engine_jax.attention.scores import AttentionMask
from shardwright.engine_jax.attention.scores import attend as attend_at_once
from shardwright.engine_jax.io.layer_io import AttentionLinks, index_of, size_of
from shardwright.engine_jax.precision.coded import Coded


def mask_of(
    positions_BT: jax.Array,
    segments_BT: jax.Array,
    kv_positions_BS: jax.Array,
    kv_segments_BS: jax.Array,
    links: AttentionLinks,
) -> AttentionMask:
    """The attention mask, which is made once a step for all layers."""
    mask = AttentionMask(
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        kv_positions_BS=in_kernel_order(kv_positions_BS, links),
        kv_segments_BS=in_kernel_order(kv_segments_BS, links),
    )
    return mask.with_visible_range() if links.kernel.name == "splash" else mask


def attend(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, links: AttentionLinks
) -> jax.Array:
    """Attention to keys and values that are all here, BTHE."""
    match links.kernel.name:
        case "full":
            return attend_at_once(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "blockwise":
            return attend_in_blocks(q_BTHD, k_BSKD, v_BSKE, mask, scale, links.kernel.block)
        case "splash":
            return splash(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "triton":
            return triton(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "cudnn":
            causal = links.chunks == IN_ORDER and q_BTHD.shape[1] == k_BSKD.shape[1]
            return cudnn(q_BTHD, k_BSKD, v_BSKE, mask, scale, causal=causal)


def attend_around_ring(
    q_BTHD: jax.Array,
    held: tuple[jax.Array, ...],
    names: tuple[str, ...],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    links: AttentionLinks,
) -> jax.Array:
    """Attention to the keys and values of all devices of a ring, BTHE. ``held``: what devices send, and its ``names``."""
    assert links.ring is not None
    block = None if links.kernel.name == "full" else links.kernel.block
    return ring_attention(q_BTHD, held, names, keys_and_values, mask, scale, links.ring, block)


def in_kernel_order(array_BS: jax.Array, links: AttentionLinks) -> jax.Array:
    """An array with all keys along dim 1, in the order of the text if the kernel requires that order."""
    if links.kernel.name != "splash" or links.chunks == IN_ORDER:
        return array_BS
    chunks = jnp.split(array_BS, len(links.chunks), axis=1)
    return jnp.concatenate([chunks[links.chunks.index(number)] for number in range(len(chunks))], axis=1)


def own_heads(weight: jax.Array | Coded, num_heads: int, links: AttentionLinks) -> jax.Array | Coded:
    """The slice of a weight, whose heads are dim 1, for this device's query heads. After an all-to-all from tokens to heads the weight has more
    heads than the queries, and the axes that shard only the queries' heads are the minor ones."""
    slices = weight.shape[1] // num_heads
    if slices == 1:
        return weight
    first = index_of(links.heads) % slices * num_heads
    if isinstance(weight, Coded):
        return weight.heads(first, num_heads)
    return jax.lax.dynamic_slice_in_dim(weight, first, num_heads, axis=1)


def own_kv_heads(kv_BSKD: jax.Array, num_heads: int, links: AttentionLinks) -> jax.Array:
    """The KV heads for this device's query heads: all, unless an axis shards the query heads and replicates the KV heads.

    The result has one KV head for each run of query heads. A run is the largest group that shares one KV head wherever the
    device's first query head is.
    """
    assert links.kv_heads == links.heads[: len(links.kv_heads)], links
    kv_replicas = links.heads[len(links.kv_heads) :]
    if not kv_replicas:
        return kv_BSKD
    sharing = num_heads * size_of(kv_replicas) // kv_BSKD.shape[2]
    run = gcd(num_heads, sharing)
    first = index_of(kv_replicas) * num_heads
    return jnp.take(kv_BSKD, (first + jnp.arange(0, num_heads, run)) // sharing, axis=2, mode="clip")
