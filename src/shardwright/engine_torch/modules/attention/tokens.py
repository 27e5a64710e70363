"""Where each token of a rank is in its text.

A rank of context parallelism has two of ``2 * size`` equal chunks of each sequence: the one of its own number, and the one of that number
from the end, as Transformer Engine shards them. So ranks have equal shares of a causal mask.

| size 2, 8 tokens | positions |
|---|---|
| rank 0 | 0 1 6 7 |
| rank 1 | 2 3 4 5 |

B rows, L tokens of a rank in each, T of queries, S of keys; packed sequences are one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.attention.scores import AttentionMask
from shardwright.engine_torch.io.private import changes_of
from shardwright.engine_torch.modules.attention.masks import ALL, Mask

CHECKED = "_shardwright_checked"
"""The attribute of lengths that were read: layers of one model share them, and each reading waits for the device."""


class Tokens(NamedTuple):
    """``positions_BL``: in their sequences. ``segments_BL``: the number of the sequence in its row; -1: padding, which attends to nothing."""

    positions_BL: torch.Tensor
    segments_BL: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The sequences of queries, or of keys. ``rows``, ``length``: of a rank. ``starts``: where each begins in one packed row of all ranks,
    and where the last one ends; None: each row is one. ``lengths``: real tokens of each sequence, on all ranks; None: all are real.
    ``masked_BL``: True is padding."""

    rows: int
    length: int
    device: torch.device
    starts: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    masked_BL: torch.Tensor | None = None

    def on_rank(self, index: int, size: int) -> Tokens:
        """The tokens of one of ``size`` ranks."""
        offsets_L = torch.arange(self.length, device=self.device)
        if self.starts is None:
            positions_BL = positions_in_text(offsets_L, self.length, index, size).expand(self.rows, -1)
            segments_BL = torch.zeros_like(positions_BL)
            if self.masked_BL is not None:
                return Tokens(positions_BL, segments_BL.masked_fill(self.masked_BL, -1))
            if self.lengths is not None:
                segments_BL = segments_BL.masked_fill(positions_BL >= self.lengths[:, None], -1)
            return Tokens(positions_BL, segments_BL)
        assert self.lengths is not None
        starts, segments_L = self.starts // size, self._sequences_of(offsets_L, size)
        in_sequence_L = offsets_L - starts[segments_L]
        positions_L = positions_in_text(in_sequence_L, starts.diff()[segments_L], index, size)
        # Tokens after the last sequence are padding too.
        segments_L = segments_L.masked_fill(positions_L >= self.lengths[segments_L], -1)
        return Tokens(positions_L[None], segments_L[None])

    def on_ranks(self, size: int) -> Tokens:
        """The tokens of all ranks, one rank after the other."""
        ranks = [self.on_rank(index, size) for index in range(size)]
        return Tokens(*(torch.cat(part, dim=1) for part in zip(*ranks, strict=True)))

    def in_text(self, size: int) -> torch.Tensor:
        """For each token of all ranks, one rank after the other, its place in a row of the text."""
        positions = self.on_ranks(size).positions_BL[0]
        if self.starts is None:
            return positions
        offsets_L = torch.arange(self.length, device=self.device)
        return positions + self.starts[self._sequences_of(offsets_L, size)].repeat(size)

    def entire(self, size: int) -> Sequences:
        """The same, with the tokens of all ranks in one."""
        return replace(self, length=self.length * size)

    def num_real(self, size: int) -> torch.Tensor:
        """How many real tokens each sequence has on all ranks."""
        if self.masked_BL is not None:
            return (~self.masked_BL).sum(dim=1)
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.rows,), self.length * size, device=self.device)

    def _sequences_of(self, offsets_L: torch.Tensor, size: int) -> torch.Tensor:
        """The number of each token's sequence; the last one for those after it."""
        assert self.starts is not None
        return torch.searchsorted(self.starts[1:-1] // size, offsets_L, right=True)


def positions_in_text(offsets: torch.Tensor, length: int | torch.Tensor, index: int, size: int) -> torch.Tensor:
    """The positions of a rank's tokens in a sequence of which it has ``length``.

    >>> positions_in_text(torch.arange(4), 4, 1, 2).tolist()
    [2, 3, 4, 5]
    """
    if size == 1:
        return offsets
    chunk = length // 2
    return offsets + torch.where(offsets < chunk, index * chunk, (2 * size - 2 - index) * chunk)


def attention_mask_of(
    mask: Mask, queries: tuple[Sequences, Tokens], keys: tuple[Sequences, Tokens], size: int
) -> AttentionMask:
    """Which keys each query attends to, but for ``arbitrary`` ones. ``size``: the ranks of which both are a part."""
    of_queries, (positions_BT, segments_BT) = queries
    of_keys, (kv_positions_BS, kv_segments_BS) = keys
    if mask.bottom_right and mask.window != ALL:
        shift = of_keys.num_real(size) - of_queries.num_real(size)
        shift_BT = shift[:, None] if of_queries.starts is None else shift[segments_BT.clamp(min=0)]
        positions_BT = positions_BT + shift_BT
    return AttentionMask(
        positions_BT=positions_BT,
        segments_BT=segments_BT,
        kv_positions_BS=kv_positions_BS,
        # Padding does not attend to padding either.
        kv_segments_BS=kv_segments_BS.where(kv_segments_BS >= 0, -2),
        window=mask.window,
    )


def read_lengths(cumulative: torch.Tensor, label: str) -> Sequence[int]:
    """Cumulative lengths as Python integers, read once from the device. Raises InputError for what is none."""
    if not isinstance(cumulative, torch.Tensor):
        raise InputError(f"{label} is a {type(cumulative).__name__}; it must be a tensor, int32 [sequences + 1].")
    version = None if cumulative.is_inference() else changes_of(cumulative)
    before = getattr(cumulative, CHECKED, None)
    if before is not None and version is not None and before[0] == version:
        return before[1]
    if cumulative.dim() != 1 or cumulative.dtype not in (torch.int32, torch.int64) or len(cumulative) < 2:
        raise InputError(
            f"{label} is {cumulative.dtype} {tuple(cumulative.shape)}; it must be int32 [sequences + 1]: 0, and the sums of the lengths so far."
        )
    numbers = cumulative.tolist()
    if numbers[0] != 0 or any(after < before for before, after in itertools.pairwise(numbers)):
        raise InputError(f"{label} is {numbers}; it must begin with 0 and not descend.")
    setattr(cumulative, CHECKED, (version, numbers))
    return numbers
