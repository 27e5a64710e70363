"""Attention of a rank's queries: to keys that it takes from the ranks that share a row, or around a ring of them.

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim. All are sizes on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import torch

from shardwright.engine_torch.attention.ring import KeysAndValues, ring_attention
from shardwright.engine_torch.attention.scores import AttentionMask, attend
from shardwright.engine_torch.io.layer_io import AttentionLinks
from shardwright.engine_torch.precision.coded import Coded


def mask_of(
    positions_BT: torch.Tensor,
    segments_BT: torch.Tensor,
    kv_positions_BS: torch.Tensor,
    kv_segments_BS: torch.Tensor,
    *,
    kept_as: torch.dtype | None,
    links: AttentionLinks,
) -> AttentionMask:
    """Of positions within a document, and the numbers of documents. ``kept_as``: the dtype of the attention's operands, where layers keep
    what it adds to scores; None: none does, and each makes it for as long as it needs it."""
    mask = AttentionMask(positions_BT, segments_BT, kv_positions_BS, kv_segments_BS)
    if kept_as is None or links.ring.group is not None:
        return mask
    return mask._replace(added_B1TS=mask.added(kept_as))


def attention(
    q_BTHD: torch.Tensor,
    held: Sequence[torch.Tensor],
    take: Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, ...]],
    keys_and_values: KeysAndValues,
    mask: AttentionMask,
    scale: float,
    links: AttentionLinks,
) -> torch.Tensor:
    """BTHE. ``held``: what a rank has of the keys and values, or of what both are made of, which ``keys_and_values`` makes them of;
    ``take``: the same of all ranks that share a row."""
    if links.ring.group is not None:
        return ring_attention(q_BTHD, tuple(held), keys_and_values, mask, scale, links.ring)
    return attend(q_BTHD, *keys_and_values(take(held)), mask, scale)


def own_heads(weight: Any, rows: int, links: AttentionLinks) -> Any:
    """The slice of a weight, whose heads are dim 0, with the ``rows`` of this rank's query heads. After an all-to-all from tokens to heads the
    weight has more heads than the queries, and the axes that shard only the queries' heads are the minor ones."""
    slices = weight.shape[0] // rows
    if slices == 1:
        return weight
    first = links.heads.index % slices * rows
    return weight.outputs(first, rows) if isinstance(weight, Coded) else weight.narrow(0, first, rows)


def own_kv_heads(kv_BSKD: torch.Tensor, num_heads: int, links: AttentionLinks) -> torch.Tensor:
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
