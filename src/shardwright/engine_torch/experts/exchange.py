"""All-to-all of rows to the ranks of their experts, and back, with any number of rows for each rank.

N rows of a rank, sorted by expert; R received rows; M embed; D ranks that share the experts, E experts of one of them.

First an all-to-all of counts, a few integers. Then an all-to-all with split sizes sends each row once and nothing else.

With a quantizer the bytes of codes and scales are sent, and what is received are their values (``core/quantization/dispatch.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_torch.io.layer_io import HowMany, as_counted
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.io.recomputation import one_operation
from shardwright.engine_torch.io.redistribute import gathered as all_gathered
from shardwright.engine_torch.io.redistribute import scattered
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.operands import codes_of


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


def to_experts(rows_NM: torch.Tensor, routes: Routes, peers: Peers, quantizer: Quantizer | None = None) -> torch.Tensor:
    """The received rows, RM, sorted by expert. ``quantizer``: of the rows; their cotangents are sent back as they are."""
    received_RM = _all_to_all(rows_NM, routes.sent_D, routes.received_D, peers, quantizer)
    return received_RM[routes.sorted_R]


def from_experts(
    rows_RM: torch.Tensor, routes: Routes, peers: Peers, quantizer: Quantizer | None = None
) -> torch.Tensor:
    """Each row's result, NM, back on its source: the transpose of ``to_experts``. ``quantizer``: of the rows' cotangents, which are sent
    to the experts."""
    back_RM = rows_RM[routes.unsorted_R]
    return _all_to_all(back_RM, routes.received_D, routes.sent_D, peers, of_cotangents=quantizer)


def with_quantized_cotangent(rows_NM: torch.Tensor, quantizer: Quantizer | None) -> torch.Tensor:
    """The rows as they are; their cotangents are the values of codes, as those that ``from_experts`` sends."""
    return rows_NM if quantizer is None else _WithQuantizedCotangent.apply(rows_NM, quantizer)  # pyright: ignore[reportReturnType]


def gathered(array: torch.Tensor, peers: Peers, quantizer: Quantizer | None = None) -> torch.Tensor:
    """All ranks' shards along dim 0. Each rank uses them differently, so the gradient is a reduce-scatter. ``quantizer``: of the rows,
    on a rank alone too; their cotangents are as they are."""
    if not array.is_floating_point():
        return all_gathered(array, 0, peers)
    return _Gathered.apply(array, peers, quantizer)  # pyright: ignore[reportReturnType]


def reduce_scattered(array: torch.Tensor, peers: Peers) -> torch.Tensor:
    """This rank's shard along dim 0 of the sum over all ranks: the transpose of ``gathered``."""
    return _ReduceScattered.apply(array, peers)  # pyright: ignore[reportReturnType]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers, quantizer: Quantizer | None) -> torch.Tensor:
        ctx.peers = peers
        return _as_codes(array, quantizer, lambda sent: all_gathered(sent, 0, peers))

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return scattered(cotangents[0], 0, ctx.peers), None, None


class _WithQuantizedCotangent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
        ctx.quantizer = quantizer
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _as_codes(cotangents[0], ctx.quantizer, lambda sent: sent), None


class _ReduceScattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, array: torch.Tensor, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return scattered(array, 0, peers)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return all_gathered(cotangents[0], 0, ctx.peers), None


class _AllToAll(torch.autograd.Function):
    """An all-to-all of rows. Its transpose is the all-to-all in the reverse direction. Of rows and of cotangents, codes are sent where
    they have a quantizer."""

    @staticmethod
    def forward(
        ctx,
        rows: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        peers: Peers,
        of_rows: Quantizer | None,
        of_cotangents: Quantizer | None,
    ) -> torch.Tensor:
        ctx.sizes, ctx.quantizer = (sent, received, peers), of_cotangents
        return _as_codes(rows, of_rows, lambda array: _exchanged(array, sent, received, peers))

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sent, received, peers = ctx.sizes
        back = _as_codes(cotangents[0], ctx.quantizer, lambda array: _exchanged(array, received, sent, peers))
        return back, None, None, None, None, None


def _all_to_all(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    peers: Peers,
    of_rows: Quantizer | None = None,
    of_cotangents: Quantizer | None = None,
) -> torch.Tensor:
    if peers.group is None and of_rows is None and of_cotangents is None:
        return rows
    return _AllToAll.apply(rows, sent, received, peers, of_rows, of_cotangents)  # pyright: ignore[reportReturnType]


def _as_codes(
    rows: torch.Tensor, quantizer: Quantizer | None, send: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What is received where rows are sent; with a quantizer the values of their codes and scales, whose bytes are sent."""
    if quantizer is None:
        return send(rows)
    own = codes_of(rows, quantizer)
    # The formula has a block where there is no row.
    arrays = own.codes, own.scales[: rows.shape[0]]
    parts = [array.contiguous().view(torch.uint8) for array in arrays]
    received = send(torch.cat(parts, dim=1))
    shape = (received.shape[0], rows.shape[1])
    if not received.shape[0]:
        return rows.new_empty(shape)
    split = received.split([part.shape[1] for part in parts], dim=1)
    codes, scales = (part.contiguous().view(array.dtype) for part, array in zip(split, arrays, strict=True))
    return dequantize(Quantized(codes, scales, None), shape, quantizer, ARRAYS).to(rows.dtype)


@one_operation
def _exchanged(rows: torch.Tensor, sent: Sequence[int], received: Sequence[int], peers: Peers) -> torch.Tensor:
    if peers.group is None:
        return rows
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
