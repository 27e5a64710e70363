"""What a load reads: the bytes that each device of a layout reads of a checkpoint, from its index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.part import box_bytes
from shardwright.checkpoint.reading.opened import Checkpoint
from shardwright.checkpoint.reading.streams import bytes_to_read
from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoad:
    """What all devices read of one tensor. ``num_bytes``: its size. ``needed_bytes``: of the boxes that they fill."""

    name: str
    num_bytes: int
    needed_bytes: int
    bytes_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a load reads, by tensor and by device."""

    tensors: tuple[TensorLoad, ...]
    bytes_by_device: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        return sum(self.bytes_by_device)


def load_of(checkpoint: Checkpoint, devices: Sequence[Mapping[str, Sequence[Box]]]) -> Load:
    """What is read where each device fills its boxes by itself. ``devices``: the boxes of each, by tensor."""
    by_device = [0] * len(devices)
    tensors: list[TensorLoad] = []
    for name, info in checkpoint.tensors.items():
        known: dict[tuple[Box, ...], int] = {}
        read = needed = 0
        for number, boxes in enumerate(devices):
            found = tuple(boxes.get(name, ()))
            if found not in known:
                known[found] = _of_boxes(checkpoint, name, found)
            by_device[number] += known[found]
            read += known[found]
            needed += sum(box_bytes(info, box) for box in found)
        if needed:
            size = box_bytes(info, Box.whole(info.shape))
            tensors.append(TensorLoad(name=name, num_bytes=size, needed_bytes=needed, bytes_read=read))
    return Load(tensors=tuple(tensors), bytes_by_device=tuple(by_device))


def _of_boxes(checkpoint: Checkpoint, name: str, boxes: Sequence[Box]) -> int:
    table, width = checkpoint.index.tables[name], DTYPES[checkpoint.tensors[name].dtype].num_bytes
    numbers = {number for box in boxes for number in table.overlapping(box).tolist()}
    total = 0
    for number in numbers:
        stored = table.box(number)
        regions = [common.within(stored) for box in boxes if (common := stored.intersect(box)) is not None]
        total += _of_regions(stored.shape, width, checkpoint.manifest.piece_bytes, tuple(regions))
    return total


@lru_cache(maxsize=10_000)
def _of_regions(shape: tuple[int, ...], width: int, piece_bytes: int, regions: tuple[Box, ...]) -> int:
    """The same for all boxes with one shape: a layout has thousands of boxes and few shapes."""
    return bytes_to_read(Box.whole(shape), width, piece_bytes, regions)
