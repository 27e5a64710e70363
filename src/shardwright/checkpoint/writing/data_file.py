"""A data file: the safetensors format, written as a stream and hashed on the way.

It is written here and not by the safetensors library because a box is hashed and written in one pass, is created only when
it is written, and is freed afterwards: the state is never in memory twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import xxhash

from shardwright.checkpoint.format.dtypes import DTYPES, as_bytes
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.header import safetensors_header
from shardwright.checkpoint.format.manifest import TensorInfo
from shardwright.checkpoint.format.part import StoredBox, StoredFile, box_bytes, header_tensors
from shardwright.checkpoint.format.pieces import PieceHasher
from shardwright.core.boxes.box import Box
from shardwright.storage.files import new_file
from shardwright.storage.url import Place

CHUNK_BYTES = 8 << 20
MAX_FILE_BYTES = 4 << 30
"""A new file is started before one grows past this; a single box larger than this has a file of its own."""
MAX_FILE_BOXES = 100_000
"""A new file is also started before the header grows past the 100 MB that the safetensors library reads."""


Lasts = Literal["now", "until the update", "always"]
"""How long elements stay as they are: until the save returns, until the program says that it updates its state, or for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBox:
    """One box of one tensor, with its elements, as its owner passes it to a save.

    ``array`` has the box's shape and the tensor's dtype (or opaque elements of the same width). Or it is a
    function that returns this array when the box is written, so that device memory is copied box by box.
    ``lasts``: how much time an asynchronous save has to copy the elements; those that last always need no copy.
    ``copy``: how to copy elements that are not in host memory, or need a look afterwards; it is given an earlier copy, whose memory
    it may use again, and returns what ``array`` would.
    """

    name: str
    box: Box
    array: np.ndarray | Callable[[], np.ndarray]
    lasts: Lasts = "now"
    copy: Callable[[np.ndarray | None], np.ndarray] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedBox:
    """Boxes of one tensor that follow each other along the first dim: stored as one box, their bytes one after the other."""

    info: TensorInfo
    members: tuple[OwnedBox, ...]

    @property
    def box(self) -> Box:
        return Box(self.members[0].box.start, self.members[-1].box.stop)

    @property
    def num_bytes(self) -> int:
        return box_bytes(self.info, self.box)

    def stored(self, file: str, offset: int, digests: np.ndarray) -> StoredBox:
        """This box once its bytes are at ``offset`` of ``file``."""
        return StoredBox(
            info=self.info, box=self.box, file=file, offset=offset, num_bytes=self.num_bytes, digests=digests
        )


def joined(boxes: Sequence[tuple[TensorInfo, OwnedBox]], max_bytes: int) -> list[JoinedBox]:
    """All boxes, joined where they can be and have no more than ``max_bytes`` together, in the order of tensors and starts.

    A stack of layers, of which each layer is sharded alike, becomes one box of all layers.
    """
    numbers: dict[str, int] = {}
    for info, _ in boxes:
        numbers.setdefault(info.name, len(numbers))
    ordered = sorted(boxes, key=lambda pair: (numbers[pair[0].name], pair[1].box.start[1:], pair[1].box.start))
    found: list[list[OwnedBox]] = []
    infos: list[TensorInfo] = []
    num_bytes = 0
    for info, owned in ordered:
        size = box_bytes(info, owned.box)
        if infos and infos[-1] is info and _follows(found[-1][-1].box, owned.box) and num_bytes + size <= max_bytes:
            found[-1].append(owned)
            num_bytes += size
        else:
            found.append([owned])
            infos.append(info)
            num_bytes = size
    rows = [JoinedBox(info=info, members=tuple(members)) for info, members in zip(infos, found, strict=True)]
    return sorted(rows, key=lambda row: (numbers[row.info.name], row.box))


def _follows(first: Box, second: Box) -> bool:
    return (
        len(first.start) > 0
        and first.stop[0] == second.start[0]
        and (first.start[1:], first.stop[1:]) == (second.start[1:], second.stop[1:])
    )


def grouped(
    boxes: Sequence[JoinedBox], max_bytes: int, max_boxes: int = MAX_FILE_BOXES
) -> Iterator[Sequence[JoinedBox]]:
    """The boxes of each file in turn, wide elements first, so that every box is aligned to its elements."""
    ordered = sorted(boxes, key=lambda box: -DTYPES[box.info.dtype].num_bytes)
    group: list[JoinedBox] = []
    num_bytes = 0
    for box in ordered:
        if group and (num_bytes + box.num_bytes > max_bytes or len(group) == max_boxes):
            yield group
            group, num_bytes = [], 0
        group.append(box)
        num_bytes += box.num_bytes
    if group:
        yield group


def header_of(boxes: Sequence[JoinedBox], step: int) -> bytes:
    """The header of a data file with these boxes, in this order."""
    tensors = header_tensors([(box.info, box.box) for box in boxes])
    return safetensors_header(tensors, {"shardwright": "2", "step": str(step)})


def described_file(path: Place, header: bytes, boxes: Sequence[JoinedBox]) -> StoredFile:
    """A data file as its part file lists it."""
    return StoredFile(
        name=path.name,
        num_bytes=len(header) + sum(box.num_bytes for box in boxes),
        header_bytes=len(header),
        header_digest=xxhash.xxh3_128_digest(header),
    )


def write_data_file(
    path: Place, boxes: Sequence[JoinedBox], step: int, piece_bytes: int
) -> tuple[StoredFile, list[StoredBox]]:
    """Writes one new file and makes it durable. Returns its description, and its boxes in the order given.

    Raises OSError, and CheckpointError (SW501) for an array whose shape or dtype does not match its box.
    """
    header = header_of(boxes, step)
    offset = len(header)
    stored: list[StoredBox] = []
    file = described_file(path, header, boxes)
    with new_file(path, file.num_bytes) as write:
        write(header)
        for box in boxes:
            hasher = PieceHasher(piece_bytes)
            for member in box.members:
                _write_box(write, hasher, box.info, member)
            stored.append(box.stored(path.name, offset, hasher.digests()))
            offset += box.num_bytes
    return file, stored


def _write_box(write: Callable[[memoryview], object], hasher: PieceHasher, info: TensorInfo, owned: OwnedBox) -> None:
    array = np.asarray(owned.array() if callable(owned.array) else owned.array)
    dtype = DTYPES[info.dtype]
    if array.shape != owned.box.shape or (array.dtype.name != dtype.name and array.dtype != dtype.raw):
        raise CheckpointError(
            f"tensor '{info.name}', box [{owned.box}]: found an array of shape {array.shape} and dtype {array.dtype.name}, "
            f"needed {owned.box.shape} and {info.dtype}.",
            code="SW501",
        )
    data = as_bytes(array).data
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        hasher.update(chunk)
        write(chunk)
