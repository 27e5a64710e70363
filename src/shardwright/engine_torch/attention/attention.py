"""Attention of one layer: grouped-query attention, or latent attention, which reshards its latent before the up-projection.

B rows, L tokens of a layer's input, T tokens of queries, S tokens of keys, H heads, K KV heads, G = H / K, D head dim,
E value dim, M embed, R latent (N compressed elements and P of the rotary key), Q q_lora. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import torch

from shardwright.engine_torch.attention.ring import ring_attention
from shardwright.engine_torch.attention.scores import AttentionMask, attend
from shardwright.engine_torch.io.layer_io import AttentionLinks, InUse, Links, LowPrecision
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.layers.norm import rms_norm
from shardwright.engine_torch.layers.product import NONE_AGREED, weight_product
from shardwright.engine_torch.layers.rotary import Angles, angles, rotate
from shardwright.engine_torch.precision.coded import Coded
from shardwright.engine_torch.precision.operands import Amaxes, input_amaxes
from shardwright.models.parts.architecture import Architecture, GroupedQueryAttention, LatentAttention


def mask_of(
    positions_BL: torch.Tensor,
    segments_BL: torch.Tensor,
    architecture: Architecture,
    links: Links,
    kept_as: torch.dtype | None,
) -> tuple[Angles, AttentionMask]:
    """The rotary angles and the attention mask, which are made once for all layers of a microbatch.

    ``positions_BL``: within a document; ``segments_BL``: the number of the document. Both are sharded as the input.
    ``kept_as``: the dtype of the attention's operands, where layers keep what it adds to scores; None: none does, and each makes it
    for as long as it needs it.
    """
    positions_BL = links.move("input.positions", "attention.positions", positions_BL)
    segments_BL = links.move("input.segments", "attention.segments", segments_BL)
    mask = AttentionMask(
        positions_BT=links.move("attention.positions", "attention.q_positions", positions_BL),
        segments_BT=links.move("attention.segments", "attention.q_segments", segments_BL),
        kv_positions_BS=links.move("attention.positions", "attention.kv_positions", positions_BL),
        kv_segments_BS=links.move("attention.segments", "attention.kv_segments", segments_BL),
    )
    if kept_as is not None and links.attention.ring.group is None:
        mask = mask._replace(added_B1TS=mask.added(kept_as))
    return angles(architecture.rope, architecture.attention.rotary_dim, positions_BL), mask


def attention(
    x_BLM: torch.Tensor,
    weights: InUse,
    architecture: Architecture,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    """What attention adds to the residual stream, BLM. ``weights``: one layer's, in use, by their names within a layer."""
    x_BLM = links.move("residual.stream", "attention.input", x_BLM)
    if isinstance(architecture.attention, GroupedQueryAttention):
        out_BTHE = _grouped(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    else:
        out_BTHE = _latent(x_BLM, weights, architecture, architecture.attention, rotation, mask, links)
    out_BLHE = links.move("attention.attended", "attention.output", named(out_BTHE, "attention.attended"))
    out_BLM = named(_projected(out_BLHE.flatten(2), "attention.o", weights, links), "attention.projected")
    return links.move("attention.projected", "residual.stream", out_BLM)


def _projected(x: torch.Tensor, name: str, weights: InUse, links: Links, amaxes: Amaxes = NONE_AGREED) -> torch.Tensor:
    return weight_product(x, weights[name], low=links.low.get(name), amaxes=amaxes)


def _input_amaxes(x_BLM: torch.Tensor, links: Links) -> Amaxes:
    """Of the input of attention, which all first projections of a layer multiply."""
    return input_amaxes([x_BLM], (links.low.get(f"attention.{name}") for name in ("q", "k", "v", "q_down", "kv_down")))


def _heads(of_all: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The products with the weights of all heads, which are concatenated along dim 0 of the weight: BLHD."""
    return of_all.unflatten(-1, (-1, head_dim))


def _grouped(
    x_BLM: torch.Tensor,
    weights: InUse,
    architecture: Architecture,
    form: GroupedQueryAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    interleaved, amaxes = architecture.rope.interleaved, _input_amaxes(x_BLM, links)
    q_BLHD = rotate(
        _heads(_projected(x_BLM, "attention.q", weights, links, amaxes), form.head_dim), rotation, interleaved
    )
    k_BLKD = rotate(
        _heads(_projected(x_BLM, "attention.k", weights, links, amaxes), form.head_dim), rotation, interleaved
    )
    v_BLKD = _heads(_projected(x_BLM, "attention.v", weights, links, amaxes), form.head_dim)
    q_BLHD, k_BLKD = named(q_BLHD, "attention.queries"), named(k_BLKD, "attention.keys")
    v_BLKD = named(v_BLKD, "attention.values")
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)
    num_heads, scale = q_BTHD.shape[2], form.head_dim**-0.5

    def own_kv(held: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        k_BSKD, v_BSKD = held
        return _own_kv_heads(k_BSKD, num_heads, links.attention), _own_kv_heads(v_BSKD, num_heads, links.attention)

    if links.attention.ring.group is not None:
        return ring_attention(q_BTHD, (k_BLKD, v_BLKD), own_kv, mask, scale, links.attention.ring)
    k_BSKD = links.move("attention.keys", "attention.keys_attended", k_BLKD)
    v_BSKD = links.move("attention.values", "attention.values_attended", v_BLKD)
    return attend(q_BTHD, *own_kv((k_BSKD, v_BSKD)), mask, scale)


def _latent(
    x_BLM: torch.Tensor,
    weights: InUse,
    architecture: Architecture,
    form: LatentAttention,
    rotation: Angles,
    mask: AttentionMask,
    links: Links,
) -> torch.Tensor:
    rope, eps, amaxes = architecture.rope, architecture.latent_norm_eps, _input_amaxes(x_BLM, links)
    if form.q_lora is None:
        q_BLHD = _heads(_projected(x_BLM, "attention.q", weights, links, amaxes), form.head_dim)
    else:
        down_BLQ = named(_projected(x_BLM, "attention.q_down", weights, links, amaxes), "attention.query_latent")
        down_BLQ = rms_norm(down_BLQ, weights["attention.q_norm"], eps, split=links.split)
        q_BLHD = _heads(_projected(down_BLQ, "attention.q_up", weights, links), form.head_dim)
    nope_BLHD, rotary_BLHP = q_BLHD.split([form.nope_dim, form.rope_dim], dim=-1)
    q_BLHD = torch.cat([nope_BLHD, rotate(rotary_BLHP, rotation, rope.interleaved)], dim=-1)
    q_BLHD = named(q_BLHD, "attention.queries")
    q_BTHD = links.move("attention.queries", "attention.queries_attended", q_BLHD)

    latent_BLR = named(_projected(x_BLM, "attention.kv_down", weights, links, amaxes), "attention.latent")
    compressed_BLN, key_BLP = latent_BLR.split([form.kv_lora, form.rope_dim], dim=-1)
    compressed_BLN = rms_norm(compressed_BLN, weights["attention.kv_norm"], eps, split=links.split)
    key_BLP = rotate(key_BLP[:, :, None, :], rotation, rope.interleaved)[:, :, 0]
    latent_BLR = torch.cat([compressed_BLN, key_BLP], dim=-1)

    scale = form.head_dim**-0.5 * rope.score_factor
    kv_up = _own_heads(weights["attention.kv_up"], q_BTHD.shape[2], form, links.attention)
    keys_and_values = _keys_and_values(kv_up, form, links.low.get("attention.kv_up"))
    if links.attention.ring.group is not None:
        return ring_attention(q_BTHD, (latent_BLR,), keys_and_values, mask, scale, links.attention.ring)
    latent_BSR = links.move("attention.latent", "attention.latent_attended", latent_BLR)
    k_BSHD, v_BSHE = keys_and_values((latent_BSR,))
    k_BSHD, v_BSHE = named(k_BSHD, "attention.keys_attended"), named(v_BSHE, "attention.values_attended")
    return attend(q_BTHD, k_BSHD, v_BSHE, mask, scale)


def _keys_and_values(
    kv_up: torch.Tensor | Coded, form: LatentAttention, low: LowPrecision | None
) -> Callable[[tuple[torch.Tensor, ...]], tuple[torch.Tensor, torch.Tensor]]:
    """A function from a latent of any tokens to the keys and values of this rank's heads."""

    def keys_and_values(held: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        (latent_BSR,) = held
        compressed_BSN, key_BSP = latent_BSR.split([form.kv_lora, form.rope_dim], dim=-1)
        kv_BSHD = _heads(weight_product(compressed_BSN, kv_up, low=low), form.nope_dim + form.value_dim)
        nope_BSHD, v_BSHE = kv_BSHD.split([form.nope_dim, form.value_dim], dim=-1)
        shared_BSHP = key_BSP[:, :, None, :].expand(*nope_BSHD.shape[:3], form.rope_dim)
        return torch.cat([nope_BSHD, shared_BSHP], dim=-1), v_BSHE

    return keys_and_values


def _own_heads(
    kv_up: torch.Tensor | Coded, num_heads: int, form: LatentAttention, links: AttentionLinks
) -> torch.Tensor | Coded:
    """The slice of the weight for this rank's query heads. After an all-to-all from tokens to heads the weight has more
    heads than the queries, and the axes that shard only the queries' heads are the minor ones."""
    rows = num_heads * (form.nope_dim + form.value_dim)
    slices = kv_up.shape[0] // rows
    if slices == 1:
        return kv_up
    first = links.heads.index % slices * rows
    return kv_up.outputs(first, rows) if isinstance(kv_up, Coded) else kv_up.narrow(0, first, rows)


def _own_kv_heads(kv_BSKD: torch.Tensor, num_heads: int, links: AttentionLinks) -> torch.Tensor:
    """The KV heads for this rank's query heads: all, unless an axis shards the query heads and replicates the KV heads.

    The result has one KV head for each run of query heads. A run is the largest group that shares one KV head wherever the
    rank's first query head is.
    """
    kv_replicas = links.kv_replicas
    if kv_replicas.group is None:
        return kv_BSKD
    sharing = num_heads * kv_replicas.size // kv_BSKD.shape[2]
    run = gcd(num_heads, sharing)
    first = kv_replicas.index * num_heads
    heads = (first + torch.arange(0, num_heads, run, device=kv_BSKD.device)) // sharing
    return kv_BSKD.index_select(2, heads)
