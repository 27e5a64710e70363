"""What a load reads: the bytes that each process reads of a checkpoint and passes on, from its index alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from shardwright.checkpoint.exchange.schedule import readers, seed_of
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.format.part import box_bytes
from shardwright.checkpoint.reading.opened import Checkpoint
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


def load_of(checkpoint: Checkpoint, wants: Mapping[str, Sequence[Want]], num_processes: int) -> Load:
    """What processes read that load together. ``wants``: of each tensor what they need; the others are not read."""
    by_process = [0] * num_processes
    tensors: list[TensorLoad] = []
    for name, info in checkpoint.tensors.items():
        if not wants.get(name):
            continue
        stored = checkpoint.stored(name)
        read = needed = passed = 0
        for unit, reader in readers(stored, wants[name], seed_of(name)):
            box = stored.box(unit.number)
            parts = tuple(dict.fromkeys(part.within(box) for _, parts in unit.needs for part in parts))
            num_bytes = _of_parts(box.shape, stored.width, stored.piece_bytes, parts)
            by_process[reader] += num_bytes
            read += num_bytes
            for want, parts in unit.needs:
                size = sum(part.size for part in parts) * stored.width
                needed += size * len(want.processes)
                passed += size * (len(want.processes) - (reader in want.processes))
        tensors.append(
            TensorLoad(
                name=name,
                num_bytes=box_bytes(info, Box.whole(info.shape)),
                needed_bytes=needed,
                bytes_read=read,
                bytes_passed_on=passed,
            )
        )
    return Load(tensors=tuple(tensors), bytes_by_process=tuple(by_process))


@lru_cache(maxsize=10_000)
def _of_parts(shape: tuple[int, ...], width: int, piece_bytes: int, parts: tuple[Box, ...]) -> int:
    """The same for all boxes with one shape: a layout has thousands of boxes and few shapes."""
    return bytes_to_read(Box.whole(shape), width, piece_bytes, parts)
