"""The units of stored boxes that are read at one time, and who needs a part of each.

A unit is a range of indices of a stored box, about ``UNIT_BYTES`` long, of complete pieces where rows allow it. So a piece is
seldom in two units, and memory is bounded however large a box is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np

from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box

UNIT_BYTES = 8 << 20
MOST_NEAR = 200
"""So many boxes are looked at one by one, to find those that are linked to one process; else all are, at one time."""

CANDIDATES = 1 << 22
"""So many pairs of boxes are compared at one time."""


@dataclass(frozen=True, slots=True)
class Unit:
    """``box`` is unit ``index`` of stored box ``number``. ``needs``: each want that has a part of it, with these parts."""

    number: int
    index: int
    box: Box
    needs: tuple[tuple[Want, tuple[Box, ...]], ...]


def unit_boxes(box: Box, width: int, piece_bytes: int) -> Iterator[Box]:
    """The boxes of the units of a stored box, in row-major order.

    >>> [str(unit) for unit in unit_boxes(Box((4, 0), (8, 1 << 20)), 4, 1 << 20)]
    ['4:6,0:1048576', '6:8,0:1048576']
    """
    shape, inner = box.shape, width
    for dim in reversed(range(len(shape))):
        if inner * shape[dim] > UNIT_BYTES:
            break
        inner *= shape[dim]
    else:
        yield box
        return
    step = max(1, UNIT_BYTES // inner)
    aligned = piece_bytes // gcd(inner, piece_bytes)
    if aligned <= step:
        step = step // aligned * aligned
    for above in product(*map(range, box.start[:dim], box.stop[:dim])):
        after = tuple(index + 1 for index in above)
        for first in range(box.start[dim], box.stop[dim], step):
            last = min(first + step, box.stop[dim])
            yield Box((*above, first, *box.start[dim + 1 :]), (*after, last, *box.stop[dim + 1 :]))


def units_of(stored: Stored, wants: Sequence[Want], process: int | None = None) -> Iterator[Unit]:
    """The units that any process needs a part of, in the order of the stored boxes.

    With ``process``, at least those of every process that is linked to it by units, directly or through others: the schedule of
    this process follows from them alone. A stored box of one process is one unit.
    """
    for number, linked in sorted(_linked(stored, wants, process).items()):
        box, found = stored.box(number), [wants[index] for index in linked]
        alone = sum(len(want.processes) for want in found) == 1
        for index, unit in enumerate([box] if alone else unit_boxes(box, stored.width, stored.piece_bytes)):
            needs = tuple((want, parts) for want in found if (parts := _parts(unit, want.boxes)))
            if needs:
                yield Unit(number, index, unit, needs)


def _parts(unit: Box, boxes: Sequence[Box]) -> tuple[Box, ...]:
    return tuple(common for box in boxes if (common := unit.intersect(box)) is not None)


def _linked(stored: Stored, wants: Sequence[Want], process: int | None) -> Mapping[int, Sequence[int]]:
    """The numbers of the stored boxes, each with the numbers of the wants that have an index of it, ascending."""
    rows = [(number, box) for number, want in enumerate(wants) for box in want.boxes]
    if not rows:
        return {}
    starts = np.array([box.start for _, box in rows], np.int64).reshape(len(rows), -1)
    stops = np.array([box.stop for _, box in rows], np.int64).reshape(len(rows), -1)
    owner = np.array([number for number, _ in rows], np.int64)
    if process is not None:
        own = [number for number, want in enumerate(wants) if process in want.processes]
        near = _near(stored, starts, stops, owner, own)
        if near is not None:
            return near
    boxes, found = overlaps(stored.starts, stored.stops, starts, stops)
    of = owner[found]
    pairs = np.unique(np.stack([boxes, of], axis=1), axis=0)
    linked: dict[int, list[int]] = {}
    for number, want in pairs.tolist():
        linked.setdefault(number, []).append(want)
    return linked


def _near(
    stored: Stored, starts: np.ndarray, stops: np.ndarray, owner: np.ndarray, own: Sequence[int]
) -> Mapping[int, Sequence[int]] | None:
    """The part of ``_linked`` that is linked to the wants ``own``; None where there are more than ``MOST_NEAR`` boxes on the way.

    ``starts``, ``stops`` and ``owner``: the boxes of all wants, and the number of the want of each.
    """
    linked: dict[int, Sequence[int]] = {}
    waiting, seen, num_boxes = list(own), set(own), 0
    while waiting:
        for row in np.flatnonzero(owner == waiting.pop()).tolist():
            num_boxes += 1
            common = ((stored.starts < stops[row]) & (stored.stops > starts[row])).all(axis=1)
            for number in np.flatnonzero(common).tolist():
                if number in linked:
                    continue
                num_boxes += 1
                if num_boxes > MOST_NEAR:
                    return None
                needs = ((starts < stored.stops[number]) & (stops > stored.starts[number])).all(axis=1)
                linked[number] = sorted(set(owner[needs].tolist()))
                waiting += [want for want in linked[number] if want not in seen]
                seen.update(linked[number])
    return linked


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
