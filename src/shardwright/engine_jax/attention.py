"""Attention of one layer: grouped queries, or a latent of which keys and values are made after it has moved.

B rows, L tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim, E value dim,
M embed, R latent (N of it the compressed part, P the rotary key), Q q_lora, C pieces of a row of queries.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import Params, Pieces, Place
from shardwright.engine_jax.norm import rms_norm
from shardwright.engine_jax.rotary import Angles, rotate
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, LatentAttention


class Sight(NamedTuple):
    """What decides which keys a query sees: those of its own document (segment), not later than itself."""

    positions_BL: jax.Array
    segments_BL: jax.Array
    kv_positions_BS: jax.Array
    kv_segments_BS: jax.Array


def attend(q_BLHD: jax.Array, k_BSKD: jax.Array, v_BSKE: jax.Array, sight: Sight, scale: float) -> jax.Array:
    """Softmax attention, BLHE; scores and softmax in float32.

    Queries of head ``h`` meet KV head ``h // (H / K)``. A kernel can stand in for this one function.
    """
    B, L, H, D = q_BLHD.shape
    K = k_BSKD.shape[2]
    q_BLKGD = q_BLHD.reshape(B, L, K, H // K, D)
    scores_BKGLS = jnp.einsum("BLKGD,BSKD->BKGLS", q_BLKGD, k_BSKD, preferred_element_type=jnp.float32) * scale
    same = sight.segments_BL[:, :, None] == sight.kv_segments_BS[:, None, :]
    earlier = sight.positions_BL[:, :, None] >= sight.kv_positions_BS[:, None, :]
    visible_BLS = same & earlier
    scores_BKGLS = jnp.where(visible_BLS[:, None, None], scores_BKGLS, jnp.finfo(jnp.float32).min)
    shares_BKGLS = jax.nn.softmax(scores_BKGLS, axis=-1).astype(v_BSKE.dtype)
    out_BLKGE = jnp.einsum("BKGLS,BSKE->BLKGE", shares_BKGLS, v_BSKE)
    return out_BLKGE.reshape(B, L, H, v_BSKE.shape[-1])


def attention(
    x_BLM: jax.Array,
    weights: Params,
    architecture: Architecture,
    turned_by: Angles,
    sight: Sight,
    place: Place,
    pieces: Pieces,
) -> jax.Array:
    """What attention adds to the residual stream, BLM. ``weights`` are one layer's, in use, by their short names."""
    x_BLM = place("attention.input", x_BLM)
    if isinstance(architecture.attention, GroupedQueryAttention):
        out_BLHE = _grouped(x_BLM, weights, architecture, architecture.attention, turned_by, sight, place)
    else:
        out_BLHE = _latent(x_BLM, weights, architecture, architecture.attention, turned_by, sight, place, pieces)
    out_BLHE = place("attention.output", out_BLHE)
    return place("attention.projected", jnp.einsum("BLHE,HEM->BLM", out_BLHE, weights["attention.o"]))


def _grouped(
    x_BLM: jax.Array,
    weights: Params,
    architecture: Architecture,
    form: GroupedQueryAttention,
    turned_by: Angles,
    sight: Sight,
    place: Place,
) -> jax.Array:
    interleaved = architecture.rope.interleaved
    q_BLHD = rotate(jnp.einsum("BLM,MHD->BLHD", x_BLM, weights["attention.q"]), turned_by, interleaved)
    k_BLKD = rotate(jnp.einsum("BLM,MKD->BLKD", x_BLM, weights["attention.k"]), turned_by, interleaved)
    v_BLKD = jnp.einsum("BLM,MKD->BLKD", x_BLM, weights["attention.v"])
    q_BLHD = place("attention.queries", q_BLHD)
    k_BSKD = place("attention.keys_attended", place("attention.keys", k_BLKD))
    v_BSKD = place("attention.values_attended", place("attention.values", v_BLKD))
    return attend(q_BLHD, k_BSKD, v_BSKD, sight, form.head_dim**-0.5)


def _latent(
    x_BLM: jax.Array,
    weights: Params,
    architecture: Architecture,
    form: LatentAttention,
    turned_by: Angles,
    sight: Sight,
    place: Place,
    pieces: Pieces,
) -> jax.Array:
    rope, eps = architecture.rope, architecture.latent_norm_eps
    if form.q_lora is None:
        q_BLHD = jnp.einsum("BLM,MHD->BLHD", x_BLM, weights["attention.q"])
    else:
        down_BLQ = jnp.einsum("BLM,MQ->BLQ", x_BLM, weights["attention.q_down"])
        down_BLQ = place("attention.query_latent", rms_norm(down_BLQ, weights["attention.q_norm"], eps))
        q_BLHD = jnp.einsum("BLQ,QHD->BLHD", down_BLQ, weights["attention.q_up"])
    plain_BLHD, turning_BLHP = jnp.split(q_BLHD, [form.nope_dim], axis=-1)
    q_BLHD = jnp.concatenate([plain_BLHD, rotate(turning_BLHP, turned_by, rope.interleaved)], axis=-1)
    q_BLHD = place("attention.queries", q_BLHD)

    latent_BLR = jnp.einsum("BLM,MR->BLR", x_BLM, weights["attention.kv_down"])
    compressed_BLN, key_BLP = jnp.split(latent_BLR, [form.kv_lora], axis=-1)
    compressed_BLN = rms_norm(compressed_BLN, weights["attention.kv_norm"], eps)
    key_BLP = rotate(key_BLP[:, :, None, :], turned_by, rope.interleaved)[:, :, 0]
    latent_BLR = place("attention.latent", jnp.concatenate([compressed_BLN, key_BLP], axis=-1))
    latent_BSR = place("attention.latent_attended", latent_BLR)
    scale = form.head_dim**-0.5 * rope.score_factor

    def one_piece(
        q_BLHD: jax.Array, latent_BSR: jax.Array, positions_BL: jax.Array, segments_BL: jax.Array
    ) -> jax.Array:
        k_BSHD, v_BSHE = _keys_and_values(latent_BSR, weights["attention.kv_up"], form, place)
        seen = sight._replace(positions_BL=positions_BL, segments_BL=segments_BL)
        return attend(q_BLHD, k_BSHD, v_BSHE, seen, scale)

    if pieces.num == 1:
        return one_piece(q_BLHD, latent_BSR, sight.positions_BL, sight.segments_BL)

    def cut(array_BL: jax.Array) -> jax.Array:
        B, L, *rest = array_BL.shape
        return array_BL.reshape(B, pieces.num, L // pieces.num, *rest)

    # Each piece makes keys and values of its own copy of the latent. Their gradients, of which each piece has its
    # part, then meet at the latent: 576 elements of a token cross the links in DeepSeek-V3, and not 40,960.
    latent_BCSR = jnp.broadcast_to(latent_BSR[:, None], (latent_BSR.shape[0], pieces.num, *latent_BSR.shape[1:]))
    by_piece = jax.vmap(one_piece, in_axes=1, out_axes=1, spmd_axis_name=pieces.axes)
    out_BCLHE = by_piece(cut(q_BLHD), latent_BCSR, cut(sight.positions_BL), cut(sight.segments_BL))
    return out_BCLHE.reshape(*q_BLHD.shape[:3], form.value_dim)


def _keys_and_values(
    latent_BSR: jax.Array, kv_up_NHD: jax.Array, form: LatentAttention, place: Place
) -> tuple[jax.Array, jax.Array]:
    compressed_BSN, key_BSP = jnp.split(latent_BSR, [form.kv_lora], axis=-1)
    kv_BSHD = jnp.einsum("BSN,NHD->BSHD", compressed_BSN, kv_up_NHD)
    plain_BSHD, v_BSHE = jnp.split(kv_BSHD, [form.nope_dim], axis=-1)
    shared_BSHP = jnp.broadcast_to(key_BSP[:, :, None, :], (*plain_BSHD.shape[:3], form.rope_dim))
    k_BSHD = place("attention.keys_attended", jnp.concatenate([plain_BSHD, shared_BSHP], axis=-1))
    return k_BSHD, place("attention.values_attended", v_BSHE)
