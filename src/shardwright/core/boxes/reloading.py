"""What ``torch.distributed.checkpoint`` makes of a dim that tensor parallelism does not divide and ``fully_shard`` shards again.

It saves a rank's shard under the rows that its placements name: their first one, and their number. ``fully_shard`` holds the rows
of its own split of the rank's shard in use. Where ``tensor`` divides the dim, both are the same rows. Elsewhere they can differ:

| the placements of a rank name | effect |
|---|---|
| rows with a gap | the save is refused: the shards of two ranks overlap |
| fewer rows than it holds | a load under the same layout leaves its last rows as they were |
| more rows than it holds | a load under another layout fails |
| other rows, as many | a load under another layout has the rows in another order |

Checkpoints of our own have the box that each rank holds, so none of this happens to them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise, product
from math import prod

from shardwright.core.boxes.boxes import shard_range


@dataclass(frozen=True, slots=True, kw_only=True)
class Reloading:
    """Numbers of ranks, of ``ranks``. ``stale``: a load under the same layout leaves rows of them as they were. ``short``: a load of
    their rows under another layout fails. ``moved``: it has other rows in the place of theirs."""

    ranks: int
    is_saved: bool
    stale: int
    short: int
    moved: int

    @property
    def is_right(self) -> bool:
        return self.is_saved and not (self.stale or self.short or self.moved)


@cache
def reloading(size: int, in_use: tuple[int, ...], gathered: int) -> Reloading:
    """A dim of ``size``, sharded in use by axes of the sizes ``in_use``, major first, and at rest by ``gathered`` more ranks.

    >>> reloading(7, (2,), 3)
    Reloading(ranks=6, is_saved=True, stale=1, short=1, moved=0)
    >>> reloading(13, (2,), 3).is_saved, reloading(10, (4,), 2).is_right
    (False, True)
    """
    is_saved, stale, short, moved = True, 0, 0, 0
    shards = prod(in_use)
    for index, alike in _kinds(size, in_use, gathered):
        # What the placements give this index of ``fully_shard``'s axis: its part of each of as many chunks as there are shards.
        parts = [shard_range(size, [(shards, chunk), (gathered, index)]) for chunk in range(shards)]
        ends = tuple(accumulate(stop - start for start, stop in parts))
        for indices in product(*map(range, in_use)):
            splits = list(zip(in_use, indices, strict=True))
            start, stop = shard_range(size, [*splits, (gathered, index)])
            low, high = shard_range(ends[-1], splits)
            number, held = high - low, stop - start
            stale += alike * (held > number)
            short += alike * (held < number)
            if number:
                first, last = (_row(parts, ends, place) for place in (low, high - 1))
                is_saved = is_saved and last - first + 1 == number
                moved += alike * (first != start and held > 0)
    return Reloading(ranks=shards * gathered, is_saved=is_saved, stale=stale, short=short, moved=moved)


def _kinds(size: int, in_use: tuple[int, ...], gathered: int) -> Iterator[tuple[int, int]]:
    """Indices along ``fully_shard``'s axis, each with the number of those that it begins and that are alike. Sizes of shards
    change only after the first index, and where a chunk ends. With several axes in use each index is one of its own.

    >>> list(_kinds(770, (4,), 512))
    [(0, 1), (1, 190), (191, 1), (192, 1), (193, 1), (194, 318)]
    """
    edges = {0, 1, gathered} if len(in_use) == 1 else {*range(gathered + 1)}
    for start, stop in {shard_range(size, [(prod(in_use), chunk)]) for chunk in range(prod(in_use))}:
        full = (stop - start) // max(1, -(-(stop - start) // gathered))
        edges |= {edge for edge in (full, full + 1) if edge < gathered}
    return ((first, after - first) for first, after in pairwise(sorted(edges)))


def _row(parts: Sequence[tuple[int, int]], ends: Sequence[int], place: int) -> int:
    """The row at a place among the rows of all parts. ``ends``: the number of rows up to the end of each part."""
    part = bisect_right(ends, place)
    return parts[part][1] - (ends[part] - place)
