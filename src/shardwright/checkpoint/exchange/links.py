"""Which boxes need a part of which others, found without looking at all pairs.

A layout has thousands of boxes and few ways in which they lie to those of another one. So boxes that lie to all wanted boxes
in the same way are of one kind, and only one of each kind is compared: with boxes of rows and wanted boxes of columns there is
one kind, where there are 16 million pairs of 4,096 boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.reading.stored import Stored

MOST_NEAR = 200
"""So many boxes are looked at one by one, to find those that are linked to one process; else all are, at one time."""

CANDIDATES = 1 << 22
"""So many pairs of boxes are compared at one time."""


@dataclass(frozen=True, slots=True, eq=False)
class Wanted:
    """The boxes of all wants, want by want. ``starts``, ``stops``: int64 (boxes, dims); ``want``: int64 (boxes,)."""

    starts: np.ndarray
    stops: np.ndarray
    want: np.ndarray

    @classmethod
    def of(cls, wants: Sequence[Want], dims: int) -> Wanted:
        boxes = [box for want in wants for box in want.boxes]
        return cls(
            np.array([box.start for box in boxes], np.int64).reshape(len(boxes), dims),
            np.array([box.stop for box in boxes], np.int64).reshape(len(boxes), dims),
            np.repeat(np.arange(len(wants)), [len(want.boxes) for want in wants]),
        )

    def of_wants(self, wants: np.ndarray) -> Wanted:
        """Those of some wants. ``wants``: int64, ascending."""
        kept = np.isin(self.want, wants)
        return Wanted(self.starts[kept], self.stops[kept], self.want[kept])


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Boxes with the wanted boxes that they overlap. ``kind``: int64 (boxes,), counted from 0 in the order of the first box of each.

    ``of``, ``wanted``, ``size``: int64 (links,), in the order of ``of`` and then of ``wanted``: a kind, the number of a wanted
    box, and how many elements they have in common.
    """

    kind: np.ndarray
    of: np.ndarray
    wanted: np.ndarray
    size: np.ndarray

    @classmethod
    def between(cls, starts: np.ndarray, stops: np.ndarray, wanted: Wanted) -> Links:
        """``starts``, ``stops``: int64 (boxes, dims)."""
        kind, first = kinds(starts, stops, wanted.starts, wanted.stops)
        starts, stops = starts[first], stops[first]
        of, number = overlaps(starts, stops, wanted.starts, wanted.stops)
        order = np.lexsort((number, of))
        of, number = of[order], number[order]
        common = np.minimum(stops[of], wanted.stops[number]) - np.maximum(starts[of], wanted.starts[number])
        return cls(kind, of, number, common.prod(axis=1))


def kinds(
    starts: np.ndarray, stops: np.ndarray, wanted_starts: np.ndarray, wanted_stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The kind of each box, int64 (boxes,), and the first box of each kind, int64 (kinds,), ascending.

    Boxes of one kind have the same shape, overlap the same wanted boxes, and have the same part in common with each, counted
    from their own starts. All arrays of boxes are int64 (boxes, dims).
    """
    kind = np.zeros(len(starts), np.int64)
    for dim in range(starts.shape[1]):
        ranges, number = _ranges(starts[:, dim], stops[:, dim])
        wanted, _ = _ranges(wanted_starts[:, dim], wanted_stops[:, dim])
        one, other = overlaps(*_columns(ranges), *_columns(wanted))
        order = np.lexsort((other, one))
        one, other = one[order], other[order]
        low = np.maximum(wanted[other, 0] - ranges[one, 0], 0)
        high = np.minimum(wanted[other, 1], ranges[one, 1]) - ranges[one, 0]
        rows = np.stack([other, low, high], axis=1)
        ends = np.searchsorted(one, np.arange(len(ranges) + 1)).tolist()
        lengths = (ranges[:, 1] - ranges[:, 0]).tolist()
        known: dict[tuple[int, bytes], int] = {}
        ids = [
            known.setdefault((length, rows[ends[at] : ends[at + 1]].tobytes()), len(known))
            for at, length in enumerate(lengths)
        ]
        kind = kind * len(known) + np.array(ids, np.int64)[number]
        kind = np.unique(kind, return_inverse=True)[1].reshape(-1)
    _, first, kind = np.unique(kind, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return place[kind.reshape(-1)], first[order]


def _ranges(starts: np.ndarray, stops: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different ranges, int64 (ranges, 2), and the number of the range of each box."""
    if len(starts) and int(stops.max()) < 1 << 31:
        found, number = np.unique(starts << 31 | stops, return_inverse=True)
        return np.stack([found >> 31, found & (1 << 31) - 1], axis=1), number.reshape(-1)
    found, number = np.unique(np.stack([starts, stops], axis=1), axis=0, return_inverse=True)
    return found, number.reshape(-1)


def _columns(ranges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return ranges[:, :1], ranges[:, 1:]


def near(stored: Stored, wanted: Wanted, own: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The stored boxes and the wants that are linked to one want by common indices, directly or through others, ascending.

    None where there are more than ``MOST_NEAR`` boxes on the way.
    """
    waiting, wants, numbers, num_boxes = [own], {own}, set[int](), 0
    while waiting:
        for row in np.flatnonzero(wanted.want == waiting.pop()).tolist():
            num_boxes += 1
            common = ((stored.starts < wanted.stops[row]) & (stored.stops > wanted.starts[row])).all(axis=1)
            for number in np.flatnonzero(common).tolist():
                if number in numbers:
                    continue
                num_boxes += 1
                if num_boxes > MOST_NEAR:
                    return None
                needs = ((wanted.starts < stored.stops[number]) & (wanted.stops > stored.starts[number])).all(axis=1)
                found = set(wanted.want[needs].tolist())
                waiting += found - wants
                wants |= found
                numbers.add(number)
    return np.array(sorted(numbers), np.int64), np.array(sorted(wants), np.int64)


def overlaps(
    starts: np.ndarray, stops: np.ndarray, other_starts: np.ndarray, other_stops: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """All pairs of a box and another box that have an index in common: their numbers, int64 (pairs,) each.

    Boxes are int64 (boxes, dims). Only those are compared that overlap along the dim that most boxes divide.
    """
    num, dims = starts.shape
    if not dims:
        first, second = np.meshgrid(np.arange(num), np.arange(len(other_starts)), indexing="ij")
        return first.ravel(), second.ravel()
    dim = max(range(dims), key=lambda dim: len(np.unique(starts[:, dim])))
    order = np.argsort(starts[:, dim], kind="stable")
    sorted_starts = starts[order, dim]
    longest = int((stops[:, dim] - starts[:, dim]).max(initial=0))
    low = np.searchsorted(sorted_starts, other_starts[:, dim] - longest, side="right")
    counts = np.maximum(np.searchsorted(sorted_starts, other_stops[:, dim], side="left") - low, 0)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    ends = np.cumsum(counts)
    first = 0
    while first < len(counts):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + CANDIDATES, side="right")))
        size = counts[first:last]
        other = np.repeat(np.arange(first, last), size)
        place = np.arange(len(other)) - np.repeat(np.cumsum(size) - size, size) + np.repeat(low[first:last], size)
        one = order[place]
        common = ((starts[one] < other_stops[other]) & (stops[one] > other_starts[other])).all(axis=1)
        found.append((one[common], other[common]))
        first = last
    nothing = np.zeros(0, np.int64)
    return tuple(np.concatenate([nothing, *(pair[which] for pair in found)]) for which in (0, 1))  # pyright: ignore[reportReturnType]
