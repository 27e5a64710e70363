"""The index: which process wrote which box, as arrays. It is made of the part files of all processes when a save is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint.format.arrays import arrays_bytes, read_arrays
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import TensorInfo
from shardwright.checkpoint.format.part import Part
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.coverage import coverage
from shardwright.storage.url import Place

ARRAYS = {"num_boxes": ("int64", 1), "corners": ("int64", 1), "part": ("int32", 1), "row": ("int32", 1)}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxTable:
    """The boxes of one tensor. ``starts`` and ``stops``: int64 (boxes, dims), in ascending order of the starts.

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Index:
    """The boxes of every tensor, by its name, in the order of the manifest."""

    tables: Mapping[str, BoxTable]

    def by_part(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """All boxes in the order of their parts and rows: tensor, part and row, int (boxes,) each; corners, int64 (...,); ends.

        The corners of box i are those from ``ends[i - 1]`` to ``ends[i]``, its start and then its stop.
        """
        tables = tuple(self.tables.values())
        sizes = np.array([len(table) for table in tables], np.int64)
        tensor = np.repeat(np.arange(len(tables)), sizes)
        part = np.concatenate([*(table.part for table in tables), np.zeros(0, np.int32)])
        row = np.concatenate([*(table.row for table in tables), np.zeros(0, np.int32)])
        corners = np.concatenate([*(_corners(table) for table in tables), np.zeros(0, np.int64)])
        lengths = np.repeat(np.array([2 * table.starts.shape[1] for table in tables], np.int64), sizes)
        order = np.lexsort((row, part))
        first = (np.cumsum(lengths) - lengths)[order]
        lengths = lengths[order]
        ends = np.cumsum(lengths)
        found = corners[np.repeat(first - (ends - lengths), lengths) + np.arange(len(corners))]
        return tensor[order], part[order], row[order], found, ends


def index_of(final: Place, infos: Sequence[TensorInfo], parts: Sequence[Part]) -> Index:
    """The boxes of all parts. Raises CheckpointError (SW501) unless they cover every tensor exactly once."""
    tensor = np.concatenate([part.tensor for part in parts])
    sizes = np.array([len(part) for part in parts])
    process, row = np.repeat(np.arange(len(parts)), sizes), np.concatenate([np.arange(size) for size in sizes])
    moved = np.repeat(np.cumsum([0, *(len(part.corners) for part in parts[:-1])]), sizes)
    first_corner = np.concatenate([part.first_corner for part in parts]) + moved
    corners = np.concatenate([part.corners for part in parts])
    order = np.argsort(tensor, kind="stable")
    ends = np.searchsorted(tensor[order], np.arange(len(infos)), side="right").tolist()
    index: dict[str, BoxTable] = {}
    for info, start, end in zip(infos, [0, *ends[:-1]][: len(ends)], ends, strict=True):
        rows, num_dims = order[start:end], len(info.shape)
        found = corners[first_corner[rows][:, None] + np.arange(2 * num_dims)]
        index[info.name] = BoxTable.sorted(found[:, :num_dims], found[:, num_dims:], process[rows], row[rows])
        check_cover(final, info.name, info.shape, index[info.name])
    return Index(tables=index)


def index_bytes(index: Index) -> bytes:
    """The bytes of the index file."""
    tables = index.tables.values()
    corners = [_corners(table) for table in tables]
    return arrays_bytes(
        {
            "num_boxes": np.array([len(table) for table in tables], np.int64),
            "corners": np.concatenate([*corners, np.zeros(0, np.int64)]),
            "part": np.concatenate([*(table.part for table in tables), np.zeros(0)]).astype(np.int32),
            "row": np.concatenate([*(table.row for table in tables), np.zeros(0)]).astype(np.int32),
        },
        {},
    )


def read_index(path: Place, data: bytes, infos: Sequence[TensorInfo], num_parts: int) -> Index:
    """The index of a file's bytes. Every box is within its tensor, and the boxes of a tensor cover it exactly once.

    Raises CheckpointError: SW501 for boxes that do not cover a tensor, else SW503.
    """
    arrays, _ = read_arrays(path, data, ARRAYS)
    counts, corners, part, row = (arrays[name] for name in ("num_boxes", "corners", "part", "row"))
    if len(counts) != len(infos) or (counts < 0).any():
        raise CheckpointError(f"{path}: num_boxes: needed one number for each of the {len(infos)} tensors.")
    total = sum(counts.tolist())
    num_corners = sum(count * 2 * len(info.shape) for count, info in zip(counts.tolist(), infos, strict=True))
    if len(part) != total or len(row) != total or len(corners) != num_corners:
        raise CheckpointError(
            f"{path}: found {len(part):,} parts, {len(row):,} rows and {len(corners):,} corners, "
            f"needed {total:,}, {total:,} and {num_corners:,}."
        )
    if total and not (part.min() >= 0 and part.max() < num_parts):
        raise CheckpointError(f"{path}: part: needed numbers of the {num_parts} parts.")
    if total and row.min() < 0:
        raise CheckpointError(f"{path}: row: found {row.min():,}, needed at least 0.")
    index: dict[str, BoxTable] = {}
    box, corner = 0, 0
    for info, count in zip(infos, counts.tolist(), strict=True):
        num_dims = len(info.shape)
        found = corners[corner : corner + count * 2 * num_dims].reshape(count, 2 * num_dims)
        starts, stops = found[:, :num_dims], found[:, num_dims:]
        table = BoxTable(starts=starts, stops=stops, part=part[box : box + count], row=row[box : box + count])
        good = ((starts >= 0) & (starts < stops) & (stops <= np.array(info.shape, np.int64))).all(axis=1)
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            raise CheckpointError(
                f"{path}: tensor '{info.name}': from {tuple(starts[bad].tolist())} to {tuple(stops[bad].tolist())} is not a box "
                f"within the shape {info.shape}.",
                code="SW501",
            )
        check_cover(path, info.name, info.shape, table)
        index[info.name] = table
        box, corner = box + count, corner + count * 2 * num_dims
    return Index(tables=index)


def _corners(table: BoxTable) -> np.ndarray:
    """The start and the stop of each box, one after the other."""
    return np.concatenate([table.starts, table.stops], axis=1).ravel()


def check_cover(place: Place, name: str, shape: Sequence[int], table: BoxTable) -> None:
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
