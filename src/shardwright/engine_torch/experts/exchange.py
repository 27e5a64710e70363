"""Rows to the ranks that hold their experts, and back: as many as there are, wherever each goes.

N rows of a rank, sorted by expert; R rows of what comes; M embed; D ranks that share the experts, E experts of one of them.

Counts are exchanged first, a few integers; the rows then travel by an all-to-all with splits, each once and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.engine_torch.io.layer_io import HowMany, as_counted
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.redistribute import gathered as gathered_parts
from shardwright.engine_torch.io.redistribute import scattered


class Routes(NamedTuple):
    """How many rows go to each rank and come from each, and where those that come lie.

    ``sizes_E``: rows that each of this rank's experts gets. ``sorted_R``: of what came, rank by rank, the rows in the order
    of the experts; ``came_from_R``: the other way round.
    """

    sent_D: Sequence[int]
    came_D: Sequence[int]
    sizes_E: torch.Tensor
    sorted_R: torch.Tensor
    came_from_R: torch.Tensor


def routes_of(counts: torch.Tensor, num: int, peers: Peers, how_many: HowMany = as_counted) -> Routes:
    """The routes of a rank's ``num`` rows; ``counts`` of them by expert of all ranks, in the order of the ranks."""
    sent_DE = counts.view(peers.size, -1)
    came_DE = _counts_exchanged(sent_DE, peers)
    sent_D, came_D = (how_many(counts_DE.sum(dim=1), num) for counts_DE in (sent_DE, came_DE))
    experts = torch.arange(came_DE.shape[1], device=counts.device).repeat(peers.size)
    expert_R = experts.repeat_interleave(came_DE.flatten(), output_size=sum(came_D))
    sorted_R = expert_R.argsort(stable=True)
    return Routes(
        sent_D=sent_D,
        came_D=came_D,
        sizes_E=came_DE.sum(dim=0),
        sorted_R=sorted_R,
        came_from_R=sorted_R.argsort(),
    )


def to_experts(rows_NM: torch.Tensor, routes: Routes, peers: Peers) -> torch.Tensor:
    """What came, RM, sorted by expert."""
    came_RM = _sent(rows_NM, routes.sent_D, routes.came_D, peers)
    return came_RM[routes.sorted_R]


def from_experts(rows_RM: torch.Tensor, routes: Routes, peers: Peers) -> torch.Tensor:
    """What became of each row, NM, where it came from."""
    return _sent(rows_RM[routes.came_from_R], routes.came_D, routes.sent_D, peers)


def gathered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """The parts of all ranks along dim 0, for each of them to use in its own way."""
    return _Gathered.apply(array, peers) if array.is_floating_point() else gathered_parts(array, 0, peers)  # pyright: ignore[reportReturnType]


def summed_parts(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """Of the sum over all ranks this one's part of dim 0: the transpose of gathering."""
    return _SummedParts.apply(array, peers)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return gathered_parts(array, 0, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scattered(cotangents[0], 0, ctx.peers), None


class _SummedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return scattered(array, 0, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gathered_parts(cotangents[0], 0, ctx.peers), None


class _Sent(torch.autograd.Function):
    """An all-to-all of rows whose transpose is the one back."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, sent: Sequence[int], came: Sequence[int], peers: Peers) -> torch.Tensor:
        ctx.way = sent, came, peers
        return _exchanged(rows, sent, came, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, came, peers = ctx.way
        return _exchanged(cotangents[0], came, sent, peers), None, None, None


def _sent(rows: torch.Tensor, sent: Sequence[int], came: Sequence[int], peers: Peers) -> torch.Tensor:
    return rows if peers.group is None else _Sent.apply(rows, sent, came, peers)  # pyright: ignore[reportReturnType]


def _exchanged(rows: torch.Tensor, sent: Sequence[int], came: Sequence[int], peers: Peers) -> torch.Tensor:
    rows = rows.contiguous()
    if not peers.in_order:
        # The group counts its ranks in mesh order, and the experts lie major first.
        rows = torch.cat([rows.split(list(sent))[place] for place in peers.place])
    out = rows.new_empty((sum(came), *rows.shape[1:]))
    dist.all_to_all_single(
        out, rows, [came[place] for place in peers.place], [sent[place] for place in peers.place], group=peers.group
    )
    if not peers.in_order:
        parts = out.split([came[place] for place in peers.place])
        out = torch.cat([parts[number] for number in peers.order])
    return out


def _counts_exchanged(sent_DE: torch.Tensor, peers: Peers) -> torch.Tensor:
    """From each rank, major first, how many rows come for each of this one's experts."""
    if peers.group is None:
        return sent_DE
    return _exchanged(sent_DE, [1] * peers.size, [1] * peers.size, peers)
