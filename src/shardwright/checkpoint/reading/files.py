"""The files of an open checkpoint: part files with their boxes, and data files, held against their digests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import numpy as np

from shardwright.checkpoint.format.arrays import MAX_BYTES
from shardwright.checkpoint.format.errors import MISSING, CheckpointError, DamagedError
from shardwright.checkpoint.format.header import check_header
from shardwright.checkpoint.format.index import Index
from shardwright.checkpoint.format.manifest import Manifest, TensorInfo
from shardwright.checkpoint.format.part import (
    InfoTable,
    Part,
    StoredBox,
    StoredFile,
    header_tensors,
    part_name,
    read_part,
)
from shardwright.checkpoint.format.pieces import digest_of
from shardwright.checkpoint.format.proof import proven
from shardwright.checkpoint.format.read_manifest import NO_MEMORY
from shardwright.core.boxes.box import Box
from shardwright.core.layout.wording import count
from shardwright.storage.files import each, open_regular, read_regular, size_of
from shardwright.storage.url import Place

RESTORE = "Restore it from a copy, or resume from another checkpoint."
CACHED_PARTS = 64


def read_known(path: Place, num_bytes: int, digest: str, holds: str) -> bytes:
    """The bytes of a file whose size and digest are known. ``holds``: a sentence about what is lost without it."""

    def read() -> bytes:
        with read_whole(path, lambda: f"{holds} {RESTORE}"):
            data = read_regular(path, MAX_BYTES)
            if len(data) == num_bytes and digest_of(data) == digest:
                return data
        problem = "does not match its digest: the file was damaged after it was written"
        if len(data) != num_bytes:
            problem = f"found {len(data)} bytes, needed {num_bytes}"
        raise DamagedError(f"{path}: {problem}. {holds} {RESTORE}", read=digest_of(data))

    return proven(path, read)


@contextmanager
def read_whole(path: Place, more: Callable[[], str]) -> Iterator[None]:
    """Turns the errors of reading a file into one message: DamagedError for a missing one. ``more``: sentences about what it held."""
    try:
        yield
    except FileNotFoundError as error:
        raise DamagedError(f"{path}: the file is missing. {more()}", read=MISSING) from error
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else NO_MEMORY
        raise CheckpointError(f"{path}: cannot be read: {reason}. {more()}") from error


@contextmanager
def read_within(path: Place) -> Iterator[None]:
    """Turns the errors of a file that is too large for the memory, or too deeply nested, into one message."""
    try:
        yield
    except MemoryError as error:
        raise CheckpointError(f"{path}: cannot be read: {NO_MEMORY}.") from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: its values are nested too deeply.") from error


class Parts:
    """The part files of a checkpoint, each read and verified when it is first needed.

    The only mutable object of an open checkpoint: a cache of the last ``CACHED_PARTS`` parts. Threads may share it.
    """

    __slots__ = ("_cache", "_directory", "_lock", "_manifest", "_table")

    def __init__(self, directory: Place, manifest: Manifest) -> None:
        self._directory, self._manifest = directory, manifest
        self._table = InfoTable.of(tuple(manifest.tensors.values()))
        self._cache: OrderedDict[int, Part] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._manifest.parts)

    def part(self, process: int) -> Part:
        """The part of one process. Raises DamagedError if it is not what was saved, CheckpointError if it cannot be read."""
        with self._lock:
            part = self._cache.get(process)
            if part is not None:
                self._cache.move_to_end(process)
                return part
        # Not under the lock: of an object store several are read at a time.
        part = self._read(process)
        with self._lock:
            self._cache[process] = part
            if len(self._cache) > CACHED_PARTS:
                self._cache.popitem(last=False)
        return part

    def box(self, process: int, row: int, name: str, box: Box) -> StoredBox:
        """Where box ``box`` of tensor ``name`` is stored, which the index has as row ``row`` of ``process``."""
        part = self.part(process)
        stored = part.box(row, self._table.infos) if row < len(part) else None
        if stored is None or stored.info.name != name or stored.box != box:
            raise CheckpointError(
                f"{self._path(process)}: row {row} is {_described(stored)}, and the index has tensor '{name}', box [{box}] there."
            )
        return stored

    def stored(self, process: int) -> list[StoredBox]:
        """All boxes of one process."""
        part = self.part(process)
        return [part.box(row, self._table.infos) for row in range(len(part))]

    def in_file(self, process: int, number: int) -> list[StoredBox]:
        """The boxes of one file of a process, in the order of their bytes."""
        part = self.part(process)
        return [part.box(row, self._table.infos) for row in part.rows_of(number)]

    def check_headers(self, process: int) -> None:
        """Compares the headers of the data files of a process with its part: other programs read the header alone.

        Raises CheckpointError, also where a file cannot be read.
        """
        for number, file in enumerate(self.part(process).files):
            boxes = self.in_file(process, number)
            _check_entries(self._directory / file.name, file, [(stored.info, stored.box) for stored in boxes])

    def check_all(self, index: Index) -> None:
        """Verifies every part file, also against the index, and the size and the header of every data file."""
        tensor, process, row, corners, ends = index.by_part()
        bounds = np.searchsorted(process, np.arange(len(self) + 1))

        def check(number: int) -> None:
            part, (low, high) = self.part(number), bounds[number : number + 2].tolist()
            first, last = int(ends[low - 1]) if low else 0, int(ends[high - 1]) if high else 0
            same = (
                np.array_equal(part.tensor, tensor[low:high])
                and np.array_equal(row[low:high], np.arange(len(part)))
                and np.array_equal(part.corners, corners[first:last])
            )
            if not same:
                raise CheckpointError(
                    f"{self._path(number)}: its boxes are not those that the index has of this process."
                )
            for at, file in enumerate(part.files):
                _check_file(self._directory, file, lambda at=at: self.in_file(number, at))

        for _ in each(self._directory, check, range(len(self))):
            pass

    def _read(self, process: int) -> Part:
        stored, path = self._manifest.parts[process], self._path(process)
        holds = f"It holds the digests of the boxes of process {process}."
        data = read_known(path, stored.num_bytes, stored.digest, holds)
        with read_within(path):
            part, piece_bytes = read_part(path, data, process, self._table)
        if piece_bytes != self._manifest.piece_bytes:
            raise CheckpointError(
                f"{path}: has digests of pieces of {piece_bytes:,} bytes, and the manifest of {self._manifest.piece_bytes:,}."
            )
        data_bytes = sum(file.num_bytes for file in part.files)
        if (len(part.files), data_bytes) != (stored.num_files, stored.data_bytes):
            raise CheckpointError(
                f"{path}: has {len(part.files)} files of {data_bytes:,} bytes, and the manifest {stored.num_files} of "
                f"{stored.data_bytes:,}."
            )
        return part

    def _path(self, process: int) -> Place:
        return self._directory / part_name(process)


def _check_file(directory: Place, file: StoredFile, boxes: Callable[[], Sequence[StoredBox]]) -> None:
    path = directory / file.name

    def holds() -> str:
        return f"It holds {_held(boxes())}. {RESTORE}"

    def check() -> None:
        with read_whole(path, holds):
            with open_regular(path) as opened:
                header = opened.read(file.header_bytes)
            num_bytes = size_of(path)
        if num_bytes == file.num_bytes and digest_of(header) == file.header_digest.hex():
            return
        problem = "its header does not match its digest: the file was damaged after it was written"
        if num_bytes != file.num_bytes:
            problem = f"found {num_bytes} bytes, needed {file.num_bytes}"
        raise DamagedError(f"{path}: {problem}. {holds()}", read=f"{num_bytes} {digest_of(header)}")

    proven(path, check)


def _check_entries(path: Place, file: StoredFile, boxes: Sequence[tuple[TensorInfo, Box]]) -> None:
    def check() -> None:
        with read_within(path):
            try:
                with open_regular(path) as opened:
                    header = opened.read(file.header_bytes)
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
            check_header(path, header, header_tensors(boxes))

    proven(path, check)


def _held(boxes: Sequence[StoredBox]) -> str:
    """Which tensors have boxes in a file, the first few by name."""
    names = list(dict.fromkeys(stored.info.name for stored in boxes))
    if not names:
        return "no boxes"
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"boxes of {shown}" + (f" and {count(len(names) - 3, 'more tensor')}" if len(names) > 3 else "")


def _described(stored: StoredBox | None) -> str:
    return "missing" if stored is None else f"tensor '{stored.info.name}', box [{stored.box}]"
