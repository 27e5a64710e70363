"""What a load reads: the bytes that each process reads of a checkpoint and passes on, from its index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwright.checkpoint.exchange.groups import Needs, needs_of
from shardwright.checkpoint.exchange.rings import rings
from shardwright.checkpoint.exchange.schedule import seed_of
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.format.index import is_grid
from shardwright.checkpoint.format.part import box_bytes
from shardwright.checkpoint.reading.opened import Checkpoint
from shardwright.checkpoint.reading.stored import Stored
from shardwright.checkpoint.reading.streams import bytes_to_read
from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoad:
    """What all processes read of one tensor. ``num_bytes``: its size. ``needed_bytes``: of the boxes that they fill.

    ``bytes_passed_on``: what they send to each other.
    """

    name: str
    num_bytes: int
    needed_bytes: int
    bytes_read: int
    bytes_passed_on: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a load reads, by tensor and by process."""

    tensors: tuple[TensorLoad, ...]
    bytes_by_process: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        return sum(self.bytes_by_process)

    @property
    def bytes_passed_on(self) -> int:
        return sum(tensor.bytes_passed_on for tensor in self.tensors)


@dataclass(frozen=True, slots=True, eq=False)
class _Units:
    """What is read of a tensor, whoever reads it. ``num_bytes``: int64 (units,), read of each."""

    needs: Needs
    num_bytes: np.ndarray


def load_of(checkpoint: Checkpoint, wants: Mapping[str, Sequence[Want]], num_processes: int) -> Load:
    """What processes read that load together. ``wants``: of each tensor what they need; the others are not read."""
    by_process = np.zeros(num_processes, np.int64)
    tensors: list[TensorLoad] = []
    # A weight and what an optimizer keeps for it have the same boxes.
    known: dict[tuple[int, bytes, bytes, int], _Units] = {}
    for name, info in checkpoint.tensors.items():
        if not wants.get(name):
            continue
        stored = checkpoint.stored(name)
        key = id(wants[name]), stored.starts.tobytes(), stored.stops.tobytes(), stored.width
        units = known.get(key) or known.setdefault(key, _units(stored, wants[name]))
        read = needed = kept = 0
        counts = np.array([len(want.processes) for want in wants[name]], np.int64)
        for ring in rings(units.needs, units.needs.groups, stored.width, seed_of(name)):
            group, readers = ring.group, ring.readers
            num_bytes = units.num_bytes[group.units[ring.units]]
            np.add.at(by_process, ring.processes[readers], num_bytes)
            read += int(num_bytes.sum())
            needed += int((group.sizes @ counts[group.wants])[group.row].sum()) * stored.width
            kept += int(group.sizes[group.row[ring.units], ring.column[readers]].sum()) * stored.width
        tensors.append(
            TensorLoad(
                name=name,
                num_bytes=box_bytes(info, Box.whole(info.shape)),
                needed_bytes=needed,
                bytes_read=read,
                bytes_passed_on=needed - kept,
            )
        )
    return Load(tensors=tuple(tensors), bytes_by_process=tuple(by_process.tolist()))


def _units(stored: Stored, wants: Sequence[Want]) -> _Units:
    needs = needs_of(stored, wants)
    units, links = needs.units, needs.links
    num_bytes = _of_complete_units(stored, needs)
    starts, stops = needs.wanted.starts, needs.wanted.stops
    _, first = np.unique(links.kind, return_index=True)
    shapes = (units.stops - units.starts)[first]
    ends = np.searchsorted(links.of, np.arange(len(first) + 1)).tolist()
    for kind, unit in enumerate(first.tolist()):
        rows = slice(ends[kind], ends[kind + 1])
        if links.size[rows].max(initial=0) in (0, shapes[kind].prod()):
            continue
        at, numbers = units.starts[unit], links.wanted[rows]
        low = np.maximum(starts[numbers] - at, 0)
        high = np.minimum(stops[numbers] - at, shapes[kind])
        corners = np.unique(np.concatenate([low, high], axis=1), axis=0)
        low, high = np.split(corners, 2, axis=1)
        if is_grid(shapes[kind].tolist(), low, high):
            continue
        for one in np.flatnonzero(links.kind == kind).tolist():
            box, inside = stored.box(int(units.number[one])), units.starts[one] - stored.starts[units.number[one]]
            parts = tuple(
                Box(tuple(start), tuple(stop))
                for start, stop in zip((low + inside).tolist(), (high + inside).tolist(), strict=True)
            )
            num_bytes[one] = _of_parts(box.shape, stored.width, stored.piece_bytes, parts)
    return _Units(needs, num_bytes)


def _of_complete_units(stored: Stored, needs: Needs) -> np.ndarray:
    """The bytes that are read of each unit where all of it is needed: its elements are in one range of the stored box."""
    units = needs.units
    starts, shapes = stored.starts[units.number], stored.stops[units.number] - stored.starts[units.number]
    first = np.zeros(len(starts), np.int64)
    for dim in range(starts.shape[1]):
        first = first * shapes[:, dim] + units.starts[:, dim] - starts[:, dim]
    start = first * stored.width // stored.piece_bytes * stored.piece_bytes
    stop = (first + (units.stops - units.starts).prod(axis=1)) * stored.width
    return np.minimum(-(-stop // stored.piece_bytes) * stored.piece_bytes, shapes.prod(axis=1) * stored.width) - start


@lru_cache(maxsize=10_000)
def _of_parts(shape: tuple[int, ...], width: int, piece_bytes: int, parts: tuple[Box, ...]) -> int:
    """The same for all boxes with one shape: a layout has thousands of boxes and few shapes."""
    return bytes_to_read(Box.whole(shape), width, piece_bytes, parts)
