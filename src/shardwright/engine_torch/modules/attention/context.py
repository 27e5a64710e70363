"""Attention of a rank's queries to the keys of all ranks of context parallelism, as ``cp_comm_type`` says.

| ``cp_comm_type`` | forward | backward | a rank computes |
|---|---|---|---|
| ``all_gather`` | all-gather of keys and values | reduce-scatter of their gradients | its queries, all keys |
| ``p2p`` | keys and values once around a ring | their gradients, the other way | its queries, all keys, a rank's after another's |
| ``a2a`` | all-to-all of queries, keys, values and output | the same | all queries and keys, of a part of the heads |

B rows, T tokens of queries, S tokens of keys, H heads, K KV heads, D head dim, E value dim; N parts of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.attention.ring import ring_attention
from shardwright.engine_torch.attention.scores import AttentionMask, attend
from shardwright.engine_torch.io import redistribute
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.modules.attention.masks import Mask
from shardwright.engine_torch.modules.attention.tokens import Sequences, attention_mask_of
from shardwright.engine_torch.modules.parts.tensor_parallel import exchanged, peers_in

Communication = Literal["p2p", "all_gather", "a2a"]
COMMUNICATIONS: tuple[Communication, ...] = get_args(Communication)

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequences, Sequences], torch.Tensor]
"""Attention of all tokens on one rank: BTHE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ranks of context parallelism, and how they exchange."""

    peers: Peers
    communication: Communication


def context_of(group: object, ranks: object, communication: object, label: str) -> Context | None:
    """None: this rank has all tokens. Raises InputError for what is no group, for other ranks than its own, and for other ways to exchange."""
    if isinstance(group, list | tuple) and communication == "a2a+p2p":
        sizes = [dist.get_world_size(part) for part in group]
        if len(sizes) != 2 or 1 not in sizes:
            raise InputError(
                f"{label}: cp_comm_type='a2a+p2p' over groups of {' x '.join(map(str, sizes))} ranks is not done here. Give one group of "
                f"all of them, and 'a2a', 'p2p' or 'all_gather'."
            )
        group, communication = (group[1], "p2p") if sizes[0] == 1 else (group[0], "a2a")
    if communication not in COMMUNICATIONS:
        raise InputError(
            f"{label}: cp_comm_type is {communication!r}; it must be one of {', '.join(map(repr, COMMUNICATIONS))}."
        )
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise InputError(
            f"{label}: cp_group is no process group that this rank is in. Give each rank the group that shares its sequences."
        )
    group_ranks = dist.get_process_group_ranks(group)
    if ranks is not None and list(ranks) != group_ranks:  # pyright: ignore[reportArgumentType]
        raise InputError(f"{label}: cp_global_ranks is {ranks}, and cp_group has {group_ranks}. Give these, or None.")
    peers = peers_in(group)
    return Context(peers=peers, communication=communication) if peers.size > 1 else None


def attend_in_context(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKE: torch.Tensor,
    queries: Sequences,
    keys: Sequences,
    mask: Mask,
    scale: float,
    context: Context,
    on_one_rank: Attend,
) -> torch.Tensor:
    """Attention of this rank's queries, BTHE."""
    peers = context.peers
    if context.communication == "a2a":
        q, k, v = (
            _all_tokens(x, sequences, peers) for x, sequences in ((q_BTHD, queries), (k_BSKD, keys), (v_BSKE, keys))
        )
        out = on_one_rank(q, k, v, queries.entire(peers.size), keys.entire(peers.size))
        # Back to the order in which ranks have them.
        return resharded(out.index_select(1, queries.in_text(peers.size)), 2, 1, peers)
    of_queries, of_keys = queries.on_rank(peers.index, peers.size), keys.on_ranks(peers.size)
    visible = attention_mask_of(mask, (queries, of_queries), (keys, of_keys), peers.size)
    blind_BT = blind(visible, peers.size)
    if context.communication == "p2p":
        held = k_BSKD.contiguous(), v_BSKE.contiguous()
        out = ring_attention(q_BTHD, held, lambda shards: (shards[0], shards[1]), visible, scale, peers)
    else:
        k_BSKD, v_BSKE = (_gathered(x, peers) for x in (k_BSKD, v_BSKE))
        visible_BTS = visible.visible() | blind_BT[..., None]
        out = attend(
            q_BTHD, k_BSKD, v_BSKE, visible._replace(added_B1TS=added(visible_BTS[:, None], q_BTHD.dtype)), scale
        )
    return out.masked_fill(blind_BT[..., None, None], 0.0)


def added(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to scores: 0, or minus infinity."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)


def blind(mask: AttentionMask, num: int) -> torch.Tensor:
    """Whether a query attends to no key, BT; computed for one of ``num`` parts of the keys after the other."""
    parts = zip(mask.kv_positions_BS.chunk(num, 1), mask.kv_segments_BS.chunk(num, 1), strict=True)
    seen_BTN = [
        mask._replace(kv_positions_BS=positions, kv_segments_BS=segments).visible().any(-1)
        for positions, segments in parts
    ]
    return ~torch.stack(seen_BTN).any(0)


def _gathered(x_BSKD: torch.Tensor, peers: Peers) -> torch.Tensor:
    return exchanged(x_BSKD.transpose(0, 1), "gathered", peers).transpose(0, 1)


def _all_tokens(x_BTHD: torch.Tensor, sequences: Sequences, peers: Peers) -> torch.Tensor:
    """All tokens in the order of the text, and this rank's part of the heads."""
    return resharded(x_BTHD, 1, 2, peers).index_select(1, sequences.in_text(peers.size).argsort())


def resharded(x: torch.Tensor, source: int, target: int, peers: Peers) -> torch.Tensor:
    """Sharded along ``target`` instead of ``source``."""
    return _Resharded.apply(x, source, target, peers)  # pyright: ignore[reportReturnType]


class _Resharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, source: int, target: int, peers: Peers) -> torch.Tensor:
        ctx.dims, ctx.peers = (source, target), peers
        return redistribute.exchanged(x, source, target, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        source, target = ctx.dims
        return redistribute.exchanged(cotangents[0], target, source, ctx.peers), None, None, None
