"""The units of stored boxes that are read at one time.

A unit is a range of indices of a stored box, about ``UNIT_BYTES`` long, of complete pieces where rows allow it. So a piece is
seldom in two units, and memory is bounded however large a box is. A box that one process alone needs is one unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import gcd

import numpy as np

from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box

UNIT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Units in the order of their stored boxes. ``starts``, ``stops``: int64 (units, dims); ``number``: int64 (units,), of the box."""

    starts: np.ndarray
    stops: np.ndarray
    number: np.ndarray

    def box(self, unit: int) -> Box:
        return Box(tuple(self.starts[unit].tolist()), tuple(self.stops[unit].tolist()))


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


def units_of(stored: Stored, numbers: np.ndarray, alone: np.ndarray) -> Units:
    """The units of some stored boxes. ``numbers``: int64 (boxes,), ascending; ``alone``: bool (boxes,), those that are one unit."""
    starts, stops = stored.starts[numbers], stored.stops[numbers]
    found = [(numbers[alone], starts[alone], stops[alone])]
    # Boxes of one shape have the same units.
    rest = np.flatnonzero(~alone)
    shapes, which = np.unique((stops - starts)[rest], axis=0, return_inverse=True)
    for number, shape in enumerate(shapes.tolist()):
        boxes = list(unit_boxes(Box.whole(shape), stored.width, stored.piece_bytes))
        low, high = (
            np.array([corner(box) for box in boxes], np.int64).reshape(len(boxes), len(shape))
            for corner in (lambda box: box.start, lambda box: box.stop)
        )
        of = np.repeat(rest[which.reshape(-1) == number], len(boxes))
        of_one = np.tile(np.arange(len(boxes)), len(of) // len(boxes))
        found.append((numbers[of], starts[of] + low[of_one], starts[of] + high[of_one]))
    number, starts, stops = (np.concatenate(each) for each in zip(*found, strict=True))
    order = np.argsort(number, kind="stable")
    return Units(starts[order], stops[order], number[order])
