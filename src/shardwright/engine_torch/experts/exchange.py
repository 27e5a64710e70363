"""All-to-all of rows to the ranks of their experts, and back, with any number of rows for each rank.

N rows of a rank, sorted by expert; R received rows; M embed; D ranks that share the experts, E experts of one of them.

First an all-to-all of counts, a few integers. Then an all-to-all with split sizes sends each row once and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.engine_torch.io.layer_io import HowMany, as_counted
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.redistribute import gathered as all_gathered
from shardwright.engine_torch.io.redistribute import scattered


class Routes(NamedTuple):
    """The number of rows to and from each rank, and the order of the received rows.

    ``sizes_E``: received rows of each of this rank's experts. ``sorted_R``: the indices that sort received rows, which are
    ordered by source rank, by expert; ``unsorted_R``: the inverse permutation.
    """

    sent_D: Sequence[int]
    received_D: Sequence[int]
    sizes_E: torch.Tensor
    sorted_R: torch.Tensor
    unsorted_R: torch.Tensor


def routes_of(counts: torch.Tensor, num: int, peers: Peers, how_many: HowMany = as_counted) -> Routes:
    """The routes of a rank's ``num`` rows. ``counts``: its rows by expert, for the experts of all ranks in the order of ranks."""
    sent_DE = counts.view(peers.size, -1)
    received_DE = _counts_exchanged(sent_DE, peers)
    sent_D, received_D = (how_many(counts_DE.sum(dim=1), num) for counts_DE in (sent_DE, received_DE))
    experts = torch.arange(received_DE.shape[1], device=counts.device).repeat(peers.size)
    expert_R = experts.repeat_interleave(received_DE.flatten(), output_size=sum(received_D))
    sorted_R = expert_R.argsort(stable=True)
    return Routes(
        sent_D=sent_D,
        received_D=received_D,
        sizes_E=received_DE.sum(dim=0),
        sorted_R=sorted_R,
        unsorted_R=sorted_R.argsort(),
    )


def to_experts(rows_NM: torch.Tensor, routes: Routes, peers: Peers) -> torch.Tensor:
    """The received rows, RM, sorted by expert."""
    received_RM = _all_to_all(rows_NM, routes.sent_D, routes.received_D, peers)
    return received_RM[routes.sorted_R]


def from_experts(rows_RM: torch.Tensor, routes: Routes, peers: Peers) -> torch.Tensor:
    """Each row's result, NM, back on its source: the transpose of ``to_experts``."""
    return _all_to_all(rows_RM[routes.unsorted_R], routes.received_D, routes.sent_D, peers)


def gathered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """All ranks' shards along dim 0. Each rank uses them differently, so the gradient is a reduce-scatter."""
    return _Gathered.apply(array, peers) if array.is_floating_point() else all_gathered(array, 0, peers)  # pyright: ignore[reportReturnType]


def reduce_scattered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """This rank's shard along dim 0 of the sum over all ranks: the transpose of ``gathered``."""
    return _ReduceScattered.apply(array, peers)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return all_gathered(array, 0, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scattered(cotangents[0], 0, ctx.peers), None


class _ReduceScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return scattered(array, 0, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gathered(cotangents[0], 0, ctx.peers), None


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows. Its transpose is the all-to-all in the reverse direction."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> torch.Tensor:
        ctx.sizes = sent, received, peers
        return _exchanged(rows, sent, received, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, peers = ctx.sizes
        return _exchanged(cotangents[0], received, sent, peers), None, None, None


def _all_to_all(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> torch.Tensor:
    return rows if peers.group is None else _AllToAll.apply(rows, sent, received, peers)  # pyright: ignore[reportReturnType]


def _exchanged(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> torch.Tensor:
    rows = rows.contiguous()
    if not peers.in_order:
        # The group numbers its ranks in mesh order; the experts are in the order of the axes, major first.
        rows = torch.cat([rows.split(list(sent))[place] for place in peers.place])
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows, [received[place] for place in peers.place], [sent[place] for place in peers.place], group=peers.group
    )
    if not peers.in_order:
        by_rank = out.split([received[place] for place in peers.place])
        out = torch.cat([by_rank[number] for number in peers.order])
    return out


def _counts_exchanged(sent_DE: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The rows that each rank, major first, sends to each of this rank's experts."""
    if peers.group is None:
        return sent_DE
    return _exchanged(sent_DE, [1] * peers.size, [1] * peers.size, peers)
