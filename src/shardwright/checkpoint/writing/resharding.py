"""Writes a checkpoint again in other boxes, as if the devices of another layout had saved it. No framework is needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwright.checkpoint.format.manifest import RunPoint, TensorInfo
from shardwright.checkpoint.format.part import (
    StoredBox,
    StoredFile,
    box_bytes,
    data_name,
    declared_name,
    part_bytes,
    part_name,
)
from shardwright.checkpoint.format.pieces import PIECE_BYTES, PieceHasher
from shardwright.checkpoint.reading.opened import Checkpoint
from shardwright.checkpoint.writing.data_file import (
    MAX_FILE_BYTES,
    JoinedBox,
    OwnedBox,
    described_file,
    grouped,
    header_of,
    joined,
)
from shardwright.checkpoint.writing.merging import declared_bytes
from shardwright.checkpoint.writing.save import Save, commit, explained, saving, write_part
from shardwright.core.boxes.box import Box
from shardwright.storage.files import write_durable, write_small
from shardwright.storage.url import Place, local_path

BATCH_BYTES = 1 << 30
"""About how many bytes of one tensor are in memory."""

Boxes = Mapping[str, Sequence[Box]]
"""The boxes of one device, by tensor."""


def reshard(
    checkpoint: Checkpoint,
    out: Place,
    point: RunPoint,
    infos: Sequence[TensorInfo],
    devices: Sequence[Boxes],
    progress: Callable[[int, int], None],
) -> Place:
    """Writes the tensors of a checkpoint under ``out`` in the boxes of ``devices``, one part for each. Returns its directory.

    All boxes of a tensor are read together, up to ``BATCH_BYTES`` at a time, so that the checkpoint is read about once. The
    boxes of all devices cover every tensor exactly once. ``progress``: bytes written, and of how many.

    An object store takes the bytes of a file only in their order. There each box is read alone, so that pieces that have elements
    of several boxes are read again.

    Raises CheckpointError, DamagedError; then nothing is left.
    """
    known = {info.name: info for info in infos}
    if local_path(out) is None:
        return _streamed(checkpoint, out, point, infos, devices, progress)
    with saving(out, point.step) as save, explained(save):
        parts = [_part(save, process, known, boxes) for process, boxes in enumerate(devices)]
        places: dict[str, list[_Place]] = {info.name: [] for info in infos}
        for part in parts:
            for place in part.places:
                places[place.box.info.name].append(place)
        total, done = sum(place.box.num_bytes for part in parts for place in part.places), 0
        written: dict[_Place, StoredBox] = {}
        for name in places:
            for batch in _batches(places[name]):
                found = checkpoint.read_boxes(name, [place.box.box for place in batch], raw=True)
                for place, array in zip(batch, found, strict=True):
                    assert isinstance(save.directory, Path)
                    written[place] = place.write(save.directory, array)
                    done += array.nbytes
                    progress(done, total)
        numbers = {info.name: number for number, info in enumerate(infos)}
        for process, part in enumerate(parts):
            part.finish(save, process, infos, numbers, written)
        return commit(save, point, num_processes=len(devices))


def _streamed(
    checkpoint: Checkpoint,
    out: Place,
    point: RunPoint,
    infos: Sequence[TensorInfo],
    devices: Sequence[Boxes],
    progress: Callable[[int, int], None],
) -> Place:
    known = {info.name: info for info in infos}
    total = sum(box_bytes(known[name], box) for boxes in devices for name in known for box in boxes.get(name, ()))
    done = 0

    def reader(name: str, box: Box) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            nonlocal done
            array = checkpoint.read_box(name, box, raw=True)
            done += array.nbytes
            progress(done, total)
            return array

        return read

    with saving(out, point.step) as save:
        for process, boxes in enumerate(devices):
            owned = (
                OwnedBox(name=name, box=box, array=reader(name, box)) for name in known for box in boxes.get(name, ())
            )
            write_part(save, infos, owned, process=process)
        return commit(save, point, num_processes=len(devices))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """Where one box goes: to ``offset`` of ``file``, which is file ``number`` of a device."""

    box: JoinedBox
    file: str
    number: int
    offset: int

    def write(self, directory: Path, array: np.ndarray) -> StoredBox:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        hasher = PieceHasher(PIECE_BYTES)
        hasher.update(data)
        descriptor = os.open(directory / self.file, os.O_WRONLY)
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(descriptor, data[done:], self.offset + done)
        finally:
            os.close(descriptor)
        return self.box.stored(self.file, self.offset, hasher.digests())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    files: list[StoredFile] = field(default_factory=list)
    places: list[_Place] = field(default_factory=list)

    def finish(
        self,
        save: Save,
        process: int,
        infos: Sequence[TensorInfo],
        numbers: Mapping[str, int],
        written: Mapping[_Place, StoredBox],
    ) -> None:
        for file in self.files:
            assert isinstance(save.directory, Path)
            descriptor = os.open(save.directory / file.name, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        rows = [(numbers[place.box.info.name], place.number, written[place]) for place in self.places]
        write_small(save.directory / declared_name(process), declared_bytes(infos))
        write_durable(save.directory / part_name(process), part_bytes(self.files, rows, PIECE_BYTES))


def _part(save: Save, process: int, infos: Mapping[str, TensorInfo], boxes: Boxes) -> _Part:
    """Makes the data files of one device, with room for all its boxes."""
    # Only the corners matter here: the elements come later.
    nothing = np.empty(0)
    owned = [
        (infos[name], OwnedBox(name=name, box=box, array=nothing))
        for name in infos
        for box in boxes.get(name, ())
        if box.size
    ]
    part = _Part()
    for number, group in enumerate(grouped(joined(owned, MAX_FILE_BYTES), MAX_FILE_BYTES)):
        path, header = save.directory / data_name(process, number), header_of(group, save.step)
        file = described_file(path, header, group)
        assert isinstance(path, Path)
        with path.open("xb") as opened:
            opened.write(header)
            os.posix_fallocate(opened.fileno(), 0, file.num_bytes)
        offset = len(header)
        for box in group:
            part.places.append(_Place(box=box, file=path.name, number=number, offset=offset))
            offset += box.num_bytes
        part.files.append(file)
    return part


def _batches(places: Sequence[_Place]) -> Iterator[Sequence[_Place]]:
    """The boxes of one tensor in the order of their starts, as many at a time as ``BATCH_BYTES`` has."""
    batch: list[_Place] = []
    num_bytes = 0
    for place in sorted(places, key=lambda place: place.box.box):
        if batch and num_bytes + place.box.num_bytes > BATCH_BYTES:
            yield batch
            batch, num_bytes = [], 0
        batch.append(place)
        num_bytes += place.box.num_bytes
    if batch:
        yield batch
