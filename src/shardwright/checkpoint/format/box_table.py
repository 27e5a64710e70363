"""The boxes of one tensor as arrays of corners, for tensors with thousands of boxes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.coverage import coverage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """``starts`` and ``stops``: int64 (boxes, dims), in ascending order of the starts.

    ``part`` and ``row``: int32 (boxes,). Each box is row ``row`` of the part file of process ``part``.
    """

    starts: np.ndarray
    stops: np.ndarray
    part: np.ndarray
    row: np.ndarray

    @classmethod
    def sorted(cls, starts: np.ndarray, stops: np.ndarray, part: np.ndarray, row: np.ndarray) -> BoxTable:
        """The same boxes in the order of their starts."""
        keys = starts.T[::-1]
        order = np.lexsort(keys) if len(keys) else np.arange(len(starts))
        return cls(starts=starts[order], stops=stops[order], part=part[order], row=row[order])

    def __len__(self) -> int:
        return len(self.starts)

    def box(self, number: int) -> Box:
        return Box(tuple(self.starts[number].tolist()), tuple(self.stops[number].tolist()))

    def boxes(self) -> tuple[Box, ...]:
        pairs = zip(self.starts.tolist(), self.stops.tolist(), strict=True)
        return tuple(Box(tuple(start), tuple(stop)) for start, stop in pairs)

    def overlapping(self, target: Box) -> np.ndarray:
        """The numbers of the boxes that have an index of ``target``, ascending."""
        start, stop = np.array(target.start, np.int64), np.array(target.stop, np.int64)
        if target.size == 0:
            return np.zeros(0, np.int64)
        return np.flatnonzero(((self.starts < stop) & (self.stops > start)).all(axis=1))


def check_cover(place: Path, name: str, shape: Sequence[int], table: BoxTable) -> None:
    """Raises CheckpointError (SW501) unless the boxes, all within the shape, cover the tensor exactly once."""
    if is_grid(shape, table.starts, table.stops):
        return
    boxes = table.boxes()
    found = coverage(boxes, shape, limit=8)
    if found.exact:
        return
    faults = [f"no box covers [{hole}]" for hole in found.holes]
    for overlap in found.overlaps:
        first, second, *_ = overlap.indices
        faults.append(f"the boxes [{boxes[first]}] and [{boxes[second]}] both cover [{overlap.region}]")
    shown = "; ".join([*faults[:4], *(["and more"] if found.more or len(faults) > 4 else [])])
    raise CheckpointError(
        f"{place}: tensor '{name}' of shape {tuple(shape)} is not covered exactly once by its boxes: {shown}.",
        code="SW501",
    )


def is_grid(shape: Sequence[int], starts: np.ndarray, stops: np.ndarray) -> bool:
    """Whether the boxes are all cells of one grid, each once: then they cover the shape exactly once.

    Layouts make grids. Its time is that of sorting the corners of each dim.

    ``starts`` and ``stops``: int64 (boxes, dims).
    """
    cells = 1
    numbers = np.zeros(len(starts), np.int64)
    for dim, size in enumerate(shape):
        lines, number = np.unique(starts[:, dim], return_inverse=True)
        if len(lines) == 0 or lines[0] != 0:
            return False
        following = np.append(lines[1:], size)
        if (stops[:, dim] != following[number]).any() or following[-1] <= lines[-1]:
            return False
        numbers = numbers * len(lines) + number
        cells *= len(lines)
        if cells > len(starts):
            return False
    return cells == len(starts) and len(np.unique(numbers)) == cells
