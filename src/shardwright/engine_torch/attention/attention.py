"""Attention of one layer: grouped queries, or a latent of which keys and values are made after it has moved.

B rows, L tokens as a layer holds them, T tokens as queries, S tokens as keys, H heads, K KV heads, G = H / K, D head dim,
E value dim, M embed, R latent (N of it the compressed part, P the rotary key), Q q_lora; all as one rank holds them.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch
from torch.nn import functional

from shardwright.engine_torch.attention.ring import attend_around
from shardwright.engine_torch.attention.scores import AttentionMask, attend
from shardwright.engine_torch.io.layer_io import AttentionLinks, Links, Params
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.layers.rotary import Angles, angles, rotate
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, LatentAttention


def mask_of(
    positions_BL: torch.Tensor, segments_BL: torch.Tensor, architecture: Architecture, links: Links
) -> tuple[Angles, AttentionMask]:
    """What queries and keys are turned by, and which keys a query sees: once a step, for all layers.

    ``positions`` within a document and ``segments``, the number of the document, as the input has them.
    """
    positions_BL = links.move("input.positions", "attention.positions", positions_BL)
    segments_BL = links.move("input.segments", "attention.segments", segments_BL)
    seen = AttentionMask(
        positions_BT=links.move("attention.positions", "attention.q_positions", positions_BL),
        segments_BT=links.move("attention.segments", "attention.q_segments", segments_BL),
        kv_positions_BS=links.move("attention.positions", "attention.kv_positions", positions_BL),
        kv_segments_BS=links.move("attention.segments", "attention.kv_segments", segments_BL),
    )
    return angles(architecture.rope, architecture.attention.rotary_dim, positions_BL), seen


def attention(
    x_BLM: torch.Tensor,
    weights: Params,
    architecture: Architecture,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    """What attention adds to the residual stream, BLM. ``weights`` are one layer's, in use, by their short names."""
    x_BLM = links.move("residual.stream", "attention.input", x_BLM)
    if isinstance(architecture.attention, GroupedQueryAttention):
        out_BTHE = _grouped(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    else:
        out_BTHE = _latent(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    out_BLHE = links.move("attention.attended", "attention.output", out_BTHE)
    out_BLM = functional.linear(out_BLHE.flatten(2), weights["attention.o"])
    return links.move("attention.projected", "residual.stream", out_BLM)


def _heads(x_BLM: torch.Tensor, weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Products with the weights of all heads, one behind the other, BLHD."""
    return functional.linear(x_BLM, weight).unflatten(-1, (-1, head_dim))


def _grouped(
    x_BLM: torch.Tensor,
    weights: Params,
    architecture: Architecture,
    form: GroupedQueryAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    interleaved = architecture.rope.interleaved
    q_BLHD = rotate(_heads(x_BLM, weights["attention.q"], form.head_dim), rotation, interleaved)
    k_BLKD = rotate(_heads(x_BLM, weights["attention.k"], form.head_dim), rotation, interleaved)
    v_BLKD = _heads(x_BLM, weights["attention.v"], form.head_dim)
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)
    num_heads, scale = q_BTHD.shape[2], form.head_dim**-0.5

    def met(held: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        k_BSKD, v_BSKD = held
        return _met(k_BSKD, num_heads, links.attention), _met(v_BSKD, num_heads, links.attention)

    if links.attention.ring.group is not None:
        return attend_around(q_BTHD, (k_BLKD, v_BLKD), met, mask, scale, links.attention.ring)
    k_BSKD = links.move("attention.keys", "attention.keys_attended", k_BLKD)
    v_BSKD = links.move("attention.values", "attention.values_attended", v_BLKD)
    return attend(q_BTHD, *met((k_BSKD, v_BSKD)), mask, scale)


def _latent(
    x_BLM: torch.Tensor,
    weights: Params,
    architecture: Architecture,
    form: LatentAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    rope, eps = architecture.rope, architecture.latent_norm_eps
    if form.q_lora is None:
        q_BLHD = _heads(x_BLM, weights["attention.q"], form.head_dim)
    else:
        down_BLQ = rms_norm(functional.linear(x_BLM, weights["attention.q_down"]), weights["attention.q_norm"], eps)
        q_BLHD = _heads(down_BLQ, weights["attention.q_up"], form.head_dim)
    plain_BLHD, turning_BLHP = q_BLHD.split([form.nope_dim, form.rope_dim], dim=-1)
    q_BLHD = torch.cat([plain_BLHD, rotate(turning_BLHP, rotation, rope.interleaved)], dim=-1)
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)

    latent_BLR = functional.linear(x_BLM, weights["attention.kv_down"])
    compressed_BLN, key_BLP = latent_BLR.split([form.kv_lora, form.rope_dim], dim=-1)
    compressed_BLN = rms_norm(compressed_BLN, weights["attention.kv_norm"], eps)
    key_BLP = rotate(key_BLP[:, :, None, :], rotation, rope.interleaved)[:, :, 0]
    latent_BLR = torch.cat([compressed_BLN, key_BLP], dim=-1)

    scale = form.head_dim**-0.5 * rope.score_factor
    kv_up = _own_heads(weights["attention.kv_up"], q_BTHD.shape[2], form, links.attention)
    made = _keys_and_values(kv_up, form)
    if links.attention.ring.group is not None:
        return attend_around(q_BTHD, (latent_BLR,), made, mask, scale, links.attention.ring)
    latent_BSR = links.move("attention.latent", "attention.latent_attended", latent_BLR)
    return attend(q_BTHD, *made((latent_BSR,)), mask, scale)


def _keys_and_values(
    kv_up: torch.Tensor, form: LatentAttention
) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values of this rank's heads, from a latent of any tokens."""

    def made(held: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        (latent_BSR,) = held
        compressed_BSN, key_BSP = latent_BSR.split([form.kv_lora, form.rope_dim], dim=-1)
        kv_BSHD = _heads(compressed_BSN, kv_up, form.nope_dim + form.value_dim)
        plain_BSHD, v_BSHE = kv_BSHD.split([form.nope_dim, form.value_dim], dim=-1)
        shared_BSHP = key_BSP[:, :, None, :].expand(*plain_BSHD.shape[:3], form.rope_dim)
        return torch.cat([plain_BSHD, shared_BSHP], dim=-1), v_BSHE

    return made


def _own_heads(kv_up: torch.Tensor, num_heads: int, form: LatentAttention, links: AttentionLinks) -> torch.Tensor:
    """The part that makes the keys of this rank's query heads: where tokens were exchanged for heads, the weight has
    more of them, and the axes that cut these alone are the minor ones."""
    rows = num_heads * (form.nope_dim + form.value_dim)
    parts = kv_up.shape[0] // rows
    return kv_up if parts == 1 else kv_up.narrow(0, links.heads.index % parts * rows, rows)


def _met(kv_BSKD: torch.Tensor, num_heads: int, links: AttentionLinks) -> torch.Tensor:
    """The KV heads that this rank's query heads meet: all, unless they are whole on an axis that cuts the query heads.

    In the longest runs of query heads that share one KV head, wherever the rank's first query head is.
    """
    kv_replicas = links.kv_replicas
    if kv_replicas.group is None:
        return kv_BSKD
    sharing = num_heads * kv_replicas.size // kv_BSKD.shape[2]
    run = gcd(num_heads, sharing)
    first = kv_replicas.index * num_heads
    heads = (first + torch.arange(0, num_heads, run, device=kv_BSKD.device)) // sharing
    return kv_BSKD.index_select(2, heads)
