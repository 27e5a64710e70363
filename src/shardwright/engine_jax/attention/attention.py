"""Attention of one layer: grouped queries, or a latent of which keys and values are made after it has moved.

B rows, L tokens as a layer holds them, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim,
E value dim, M embed, R latent (N of it the compressed part, P the rotary key), Q q_lora; all as one device holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp

from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_jax.attention.blockwise import attend_in_blocks
from shardwright.engine_jax.attention.kernels import cudnn, splash, triton
from shardwright.engine_jax.attention.ring import KeysAndValues, attend_around
from shardwright.engine_jax.attention.scores import AttentionMask, attend
from shardwright.engine_jax.io.layer_io import AttentionLinks, Links, Params, index_of, size_of
from shardwright.engine_jax.layers.norm import rms_norm
from shardwright.engine_jax.layers.product import weight_product
from shardwright.engine_jax.layers.rotary import Angles, angles, rotate
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, LatentAttention


def mask_of(
    positions_BL: jax.Array, segments_BL: jax.Array, architecture: Architecture, links: Links
) -> tuple[Angles, AttentionMask]:
    """What queries and keys are turned by, and which keys a query sees: once a step, for all layers.

    ``positions`` within a document and ``segments``, the number of the document, as the input has them, int32.
    """
    positions_BL = links.move("input.positions", "attention.positions", positions_BL)
    segments_BL = links.move("input.segments", "attention.segments", segments_BL)
    kv_positions_BS = links.move("attention.positions", "attention.kv_positions", positions_BL)
    kv_segments_BS = links.move("attention.segments", "attention.kv_segments", segments_BL)
    seen = AttentionMask(
        positions_BT=links.move("attention.positions", "attention.q_positions", positions_BL),
        segments_BT=links.move("attention.segments", "attention.q_segments", segments_BL),
        kv_positions_BS=_as_told(kv_positions_BS, links.attention),
        kv_segments_BS=_as_told(kv_segments_BS, links.attention),
    )
    if links.attention.kernel.name == "splash":
        seen = seen.with_reach()
    return angles(architecture.rope, architecture.attention.rotary_dim, positions_BL), seen


def attention(
    x_BLM: jax.Array, weights: Params, architecture: Architecture, rotation: Angles, mask: AttentionMask, links: Links
) -> jax.Array:
    """What attention adds to the residual stream, BLM. ``weights`` are one layer's, in use, by their short names."""
    x_BLM = links.move("residual.stream", "attention.input", x_BLM)
    if isinstance(architecture.attention, GroupedQueryAttention):
        out_BTHE = _grouped(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    else:
        out_BTHE = _latent(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    out_BLHE = links.move("attention.attended", "attention.output", out_BTHE)
    out_BLM = weight_product("BLHE,HEM->BLM", out_BLHE, weights["attention.o"])
    return links.move("attention.projected", "residual.stream", out_BLM)


def _grouped(
    x_BLM: jax.Array,
    weights: Params,
    architecture: Architecture,
    form: GroupedQueryAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> jax.Array:
    interleaved = architecture.rope.interleaved
    q_BLHD = rotate(weight_product("BLM,MHD->BLHD", x_BLM, weights["attention.q"]), rotation, interleaved)
    k_BLKD = rotate(weight_product("BLM,MKD->BLKD", x_BLM, weights["attention.k"]), rotation, interleaved)
    v_BLKD = weight_product("BLM,MKD->BLKD", x_BLM, weights["attention.v"])
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)
    num_heads, scale = q_BTHD.shape[2], form.head_dim**-0.5

    def met(held: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        k_BSKD, v_BSKD = held
        return _met(k_BSKD, num_heads, links.attention), _met(v_BSKD, num_heads, links.attention)

    if links.attention.ring:
        return _around(q_BTHD, (k_BLKD, v_BLKD), met, mask, scale, links.attention)
    k_BSKD = _as_told(links.move("attention.keys", "attention.keys_attended", k_BLKD), links.attention)
    v_BSKD = _as_told(links.move("attention.values", "attention.values_attended", v_BLKD), links.attention)
    return _attend(q_BTHD, *met((k_BSKD, v_BSKD)), mask, scale, links.attention)


def _latent(
    x_BLM: jax.Array,
    weights: Params,
    architecture: Architecture,
    form: LatentAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> jax.Array:
    rope, eps = architecture.rope, architecture.latent_norm_eps
    if form.q_lora is None:
        q_BLHD = weight_product("BLM,MHD->BLHD", x_BLM, weights["attention.q"])
    else:
        down_BLQ = weight_product("BLM,MQ->BLQ", x_BLM, weights["attention.q_down"])
        down_BLQ = rms_norm(down_BLQ, weights["attention.q_norm"], eps)
        q_BLHD = weight_product("BLQ,QHD->BLHD", down_BLQ, weights["attention.q_up"])
    plain_BLHD, turning_BLHP = jnp.split(q_BLHD, [form.nope_dim], axis=-1)
    q_BLHD = jnp.concatenate([plain_BLHD, rotate(turning_BLHP, rotation, rope.interleaved)], axis=-1)
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)

    latent_BLR = weight_product("BLM,MR->BLR", x_BLM, weights["attention.kv_down"])
    compressed_BLN, key_BLP = jnp.split(latent_BLR, [form.kv_lora], axis=-1)
    compressed_BLN = rms_norm(compressed_BLN, weights["attention.kv_norm"], eps)
    key_BLP = rotate(key_BLP[:, :, None, :], rotation, rope.interleaved)[:, :, 0]
    latent_BLR = jnp.concatenate([compressed_BLN, key_BLP], axis=-1)

    scale = form.head_dim**-0.5 * rope.score_factor
    made = _keys_and_values(_own_heads(weights["attention.kv_up"], q_BTHD.shape[2], links.attention), form)
    if links.attention.ring:
        return _around(q_BTHD, latent_BLR, made, mask, scale, links.attention)
    latent_BSR = _as_told(links.move("attention.latent", "attention.latent_attended", latent_BLR), links.attention)
    return _attend(q_BTHD, *made(latent_BSR), mask, scale, links.attention)


def _attend(
    q_BTHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, mask: AttentionMask, scale: float, links: AttentionLinks
) -> jax.Array:
    match links.kernel.name:
        case "full":
            return attend(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "blockwise":
            return attend_in_blocks(q_BTHD, k_BSKD, v_BSKE, mask, scale, links.kernel.block)
        case "splash":
            return splash(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "triton":
            return triton(q_BTHD, k_BSKD, v_BSKE, mask, scale)
        case "cudnn":
            causal = links.chunks == IN_ORDER and q_BTHD.shape[1] == k_BSKD.shape[1]
            return cudnn(q_BTHD, k_BSKD, v_BSKE, mask, scale, causal=causal)


def _around(
    q_BTHD: jax.Array, held: Any, made: KeysAndValues, mask: AttentionMask, scale: float, links: AttentionLinks
) -> jax.Array:
    assert links.ring is not None
    block = None if links.kernel.name == "full" else links.kernel.block
    return attend_around(q_BTHD, held, made, mask, scale, links.ring, block)


def _as_told(array_BS: jax.Array, links: AttentionLinks) -> jax.Array:
    """What is of all keys, dim 1, in the order of the text where the kernel is told no other."""
    if links.kernel.name != "splash" or links.chunks == IN_ORDER:
        return array_BS
    parts = jnp.split(array_BS, len(links.chunks), axis=1)
    return jnp.concatenate([parts[links.chunks.index(number)] for number in range(len(parts))], axis=1)


def _keys_and_values(kv_up_NHD: jax.Array, form: LatentAttention) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    """Keys and values of this device's heads, from a latent of any tokens."""

    def made(latent_BSR: jax.Array) -> tuple[jax.Array, jax.Array]:
        compressed_BSN, key_BSP = jnp.split(latent_BSR, [form.kv_lora], axis=-1)
        kv_BSHD = weight_product("BSN,NHD->BSHD", compressed_BSN, kv_up_NHD)
        plain_BSHD, v_BSHE = jnp.split(kv_BSHD, [form.nope_dim], axis=-1)
        shared_BSHP = jnp.broadcast_to(key_BSP[:, :, None, :], (*plain_BSHD.shape[:3], form.rope_dim))
        return jnp.concatenate([plain_BSHD, shared_BSHP], axis=-1), v_BSHE

    return made


def _own_heads(kv_up_NHD: jax.Array, num_heads: int, links: AttentionLinks) -> jax.Array:
    """The part that makes the keys of this device's query heads: where tokens were exchanged for heads, the weight has
    more of them, and the axes that cut these alone are the minor ones."""
    parts = kv_up_NHD.shape[1] // num_heads
    if parts == 1:
        return kv_up_NHD
    return jax.lax.dynamic_slice_in_dim(kv_up_NHD, index_of(links.heads) % parts * num_heads, num_heads, axis=1)


def _met(kv_BSKD: jax.Array, num_heads: int, links: AttentionLinks) -> jax.Array:
    """The KV heads that this device's query heads meet: all, unless they are whole on an axis that cuts the query heads.

    In the longest runs of query heads that share one KV head, wherever the device's first query head is.
    """
    assert links.kv_heads == links.heads[: len(links.kv_heads)], links
    without = links.heads[len(links.kv_heads) :]
    if not without:
        return kv_BSKD
    sharing = num_heads * size_of(without) // kv_BSKD.shape[2]
    run = gcd(num_heads, sharing)
    first = index_of(without) * num_heads
    return jnp.take(kv_BSKD, (first + jnp.arange(0, num_heads, run)) // sharing, axis=2, mode="clip")
