"""Attention of one layer: grouped-query attention, or latent attention, which reshards its latent before the up-projection.

B rows, L tokens of a layer's input, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim,
E value dim, M embed, R latent (N compressed elements and P of the rotary key), Q q_lora. All are sizes on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.engine_jax.attention.blockwise import attend_in_blocks
from shardwright.engine_jax.attention.kernels import cudnn, splash, triton
from shardwright.engine_jax.attention.ring import KeysAndValues, ring_attention
from shardwright.engine_jax.attention.scores import AttentionMask, attend
from shardwright.engine_jax.io.layer_io import AttentionLinks, InUse, Links, LowPrecision, index_of, size_of
from shardwright.engine_jax.layers.norm import rms_norm
from shardwright.engine_jax.layers.product import NONE_AGREED, weight_product
from shardwright.engine_jax.layers.rotary import Angles, angles, rotate
from shardwright.engine_jax.precision.coded import Coded
from shardwright.engine_jax.precision.delayed import several
from shardwright.engine_jax.precision.operands import Amaxes, input_amaxes
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, LatentAttention


def mask_of(
    positions_BL: jax.Array, segments_BL: jax.Array, architecture: Architecture, links: Links
) -> tuple[Angles, AttentionMask]:
    """The rotary angles and the attention mask, which are made once a step for all layers.

    ``positions_BL``: within a document; ``segments_BL``: the number of the document. Both are sharded as the input, int32.
    """
    positions_BL = links.move("input.positions", "attention.positions", positions_BL)
    segments_BL = links.move("input.segments", "attention.segments", segments_BL)
    kv_positions_BS = links.move("attention.positions", "attention.kv_positions", positions_BL)
    kv_segments_BS = links.move("attention.segments", "attention.kv_segments", segments_BL)
    mask = AttentionMask(
        positions_BT=links.move("attention.positions", "attention.q_positions", positions_BL),
        segments_BT=links.move("attention.segments", "attention.q_segments", segments_BL),
        kv_positions_BS=_in_kernel_order(kv_positions_BS, links.attention),
        kv_segments_BS=_in_kernel_order(kv_segments_BS, links.attention),
    )
    if links.attention.kernel.name == "splash":
        mask = mask.with_visible_range()
    return angles(architecture.rope, architecture.attention.rotary_dim, positions_BL), mask


def attention(
    x_BLM: jax.Array, weights: InUse, architecture: Architecture, rotation: Angles, mask: AttentionMask, links: Links
) -> jax.Array:
    """What attention adds to the residual stream, BLM. ``weights``: one layer's, in use, by their names within a layer."""
    x_BLM = links.move("residual.stream", "attention.input", x_BLM)
    if isinstance(architecture.attention, GroupedQueryAttention):
        out_BTHE = _grouped(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    else:
        out_BTHE = _latent(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    out_BLHE = links.move("attention.attended", "attention.output", out_BTHE)
    out_BLM = _projected("BLHE,HEM->BLM", out_BLHE, "attention.o", weights, links)
    out_BLM = checkpoint_name(out_BLM, "attention.projected")
    return links.move("attention.projected", "residual.stream", out_BLM)


def _projected(
    dims: str, x: jax.Array, name: str, weights: InUse, links: Links, amaxes: Amaxes = NONE_AGREED
) -> jax.Array:
    return weight_product(dims, x, weights[name], low=links.low.get(name), amaxes=amaxes)


def _input_amaxes(x_BLM: jax.Array, links: Links) -> Amaxes:
    """Of the input of attention, which all first projections of a layer multiply."""
    return input_amaxes(x_BLM, (links.low.get(f"attention.{name}") for name in ("q", "k", "v", "q_down", "kv_down")))


def _grouped(
    x_BLM: jax.Array,
    weights: InUse,
    architecture: Architecture,
    form: GroupedQueryAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> jax.Array:
    interleaved, amaxes = architecture.rope.interleaved, _input_amaxes(x_BLM, links)
    q_BLHD = rotate(_projected("BLM,MHD->BLHD", x_BLM, "attention.q", weights, links, amaxes), rotation, interleaved)
    k_BLKD = rotate(_projected("BLM,MKD->BLKD", x_BLM, "attention.k", weights, links, amaxes), rotation, interleaved)
    v_BLKD = _projected("BLM,MKD->BLKD", x_BLM, "attention.v", weights, links, amaxes)
    q_BLHD, k_BLKD = checkpoint_name(q_BLHD, "attention.queries"), checkpoint_name(k_BLKD, "attention.keys")
    v_BLKD = checkpoint_name(v_BLKD, "attention.values")
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)
    num_heads, scale = q_BTHD.shape[2], form.head_dim**-0.5

    def own_kv(held: tuple[jax.Array, jax.Array], _: int = 0) -> tuple[jax.Array, jax.Array]:
        k_BSKD, v_BSKD = held
        return _own_kv_heads(k_BSKD, num_heads, links.attention), _own_kv_heads(v_BSKD, num_heads, links.attention)

    if links.attention.ring:
        names = ("attention.keys_attended", "attention.values_attended")
        return _ring(q_BTHD, (k_BLKD, v_BLKD), names, own_kv, mask, scale, links.attention)
    k_BSKD = _in_kernel_order(links.move("attention.keys", "attention.keys_attended", k_BLKD), links.attention)
    v_BSKD = _in_kernel_order(links.move("attention.values", "attention.values_attended", v_BLKD), links.attention)
    return _attend(q_BTHD, *own_kv((k_BSKD, v_BSKD)), mask, scale, links.attention)


def _latent(
    x_BLM: jax.Array,
    weights: InUse,
    architecture: Architecture,
    form: LatentAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> jax.Array:
    rope, eps, amaxes = architecture.rope, architecture.latent_norm_eps, _input_amaxes(x_BLM, links)
    if form.q_lora is None:
        q_BLHD = _projected("BLM,MHD->BLHD", x_BLM, "attention.q", weights, links, amaxes)
    else:
        down_BLQ = _projected("BLM,MQ->BLQ", x_BLM, "attention.q_down", weights, links, amaxes)
        down_BLQ = checkpoint_name(down_BLQ, "attention.query_latent")
        down_BLQ = rms_norm(down_BLQ, weights["attention.q_norm"], eps)
        q_BLHD = _projected("BLQ,QHD->BLHD", down_BLQ, "attention.q_up", weights, links)
    nope_BLHD, rotary_BLHP = jnp.split(q_BLHD, [form.nope_dim], axis=-1)
    q_BLHD = jnp.concatenate([nope_BLHD, rotate(rotary_BLHP, rotation, rope.interleaved)], axis=-1)
    q_BLHD = checkpoint_name(q_BLHD, "attention.queries")
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)

    latent_BLR = _projected("BLM,MR->BLR", x_BLM, "attention.kv_down", weights, links, amaxes)
    latent_BLR = checkpoint_name(latent_BLR, "attention.latent")
    compressed_BLN, key_BLP = jnp.split(latent_BLR, [form.kv_lora], axis=-1)
    compressed_BLN = rms_norm(compressed_BLN, weights["attention.kv_norm"], eps)
    key_BLP = rotate(key_BLP[:, :, None, :], rotation, rope.interleaved)[:, :, 0]
    latent_BLR = jnp.concatenate([compressed_BLN, key_BLP], axis=-1)

    scale = form.head_dim**-0.5 * rope.score_factor
    kv_up_NHD = _own_heads(weights["attention.kv_up"], q_BTHD.shape[2], links.attention)
    shards = len(links.attention.ring.numbers) if links.attention.ring else 1
    keys_and_values = _keys_and_values(kv_up_NHD, form, several(links.low.get("attention.kv_up"), shards))
    if links.attention.ring:
        names = ("attention.latent_attended",)
        return _ring(
            q_BTHD,
            (latent_BLR,),
            names,
            lambda held, step: keys_and_values(held[0], step),
            mask,
            scale,
            links.attention,
        )
    latent_BSR = _in_kernel_order(
        links.move("attention.latent", "attention.latent_attended", latent_BLR), links.attention
    )
    return _attend(q_BTHD, *keys_and_values(latent_BSR, 0), mask, scale, links.attention)


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


def _ring(
    q_BTHD: jax.Array,
    held: tuple[jax.Array, ...],
    names: tuple[str, ...],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    links: AttentionLinks,
) -> jax.Array:
    assert links.ring is not None
    block = None if links.kernel.name == "full" else links.kernel.block
    return ring_attention(q_BTHD, held, names, keys_and_values, mask, scale, links.ring, block)


def _in_kernel_order(array_BS: jax.Array, links: AttentionLinks) -> jax.Array:
    """An array with all keys along dim 1, in the order of the text if the kernel requires that order."""
    if links.kernel.name != "splash" or links.chunks == IN_ORDER:
        return array_BS
    chunks = jnp.split(array_BS, len(links.chunks), axis=1)
    return jnp.concatenate([chunks[links.chunks.index(number)] for number in range(len(chunks))], axis=1)


def _keys_and_values(
    kv_up_NHD: jax.Array | Coded, form: LatentAttention, low: Sequence[LowPrecision | None]
) -> KeysAndValues:
    """A function from a latent of any tokens to the keys and values of this device's heads. ``low``: of each shard of a ring."""

    def keys_and_values(latent_BSR: jax.Array, shard: int) -> tuple[jax.Array, jax.Array]:
        compressed_BSN, key_BSP = jnp.split(latent_BSR, [form.kv_lora], axis=-1)
        kv_BSHD = weight_product("BSN,NHD->BSHD", compressed_BSN, kv_up_NHD, low=low[shard])
        nope_BSHD, v_BSHE = jnp.split(kv_BSHD, [form.nope_dim], axis=-1)
        shared_BSHP = jnp.broadcast_to(key_BSP[:, :, None, :], (*nope_BSHD.shape[:3], form.rope_dim))
        k_BSHD = checkpoint_name(jnp.concatenate([nope_BSHD, shared_BSHP], axis=-1), "attention.keys_attended")
        return k_BSHD, checkpoint_name(v_BSHE, "attention.values_attended")

    return keys_and_values


def _own_heads(kv_up_NHD: jax.Array | Coded, num_heads: int, links: AttentionLinks) -> jax.Array | Coded:
    """The slice of the weight for this device's query heads. After an all-to-all from tokens to heads the weight has more
    heads than the queries, and the axes that shard only the queries' heads are the minor ones."""
    slices = kv_up_NHD.shape[1] // num_heads
    if slices == 1:
        return kv_up_NHD
    first = index_of(links.heads) % slices * num_heads
    if isinstance(kv_up_NHD, Coded):
        return kv_up_NHD.heads(first, num_heads)
    return jax.lax.dynamic_slice_in_dim(kv_up_NHD, first, num_heads, axis=1)


def _own_kv_heads(kv_BSKD: jax.Array, num_heads: int, links: AttentionLinks) -> jax.Array:
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
