"""Reads regions of stored boxes as streams of verified pieces. Nothing is read that no region needs, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import TracebackType

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.part import StoredBox
from shardwright.checkpoint.format.pieces import digest_of, first_mismatch
from shardwright.checkpoint.format.proof import proven
from shardwright.core.boxes.box import Box
from shardwright.storage.files import open_regular, system_of
from shardwright.storage.url import Place

BLOCK_BYTES = 8 << 20
"""About how many bytes of a box are in memory besides the arrays that are filled."""


def read_regions(
    directory: Place, stored: StoredBox, piece_bytes: int, targets: Sequence[tuple[Box, np.ndarray]]
) -> int:
    """Fills the part of each target that a stored box has, and returns the bytes read.

    ``targets``: boxes of the tensor, each with its array of unsigned integers of the dtype's width.
    Raises DamagedError for bytes that are not those that were saved, CheckpointError where they cannot be read.
    """
    width = DTYPES[stored.info.dtype].num_bytes
    regions: list[tuple[Box, np.ndarray]] = []
    for box, array in targets:
        common = stored.box.intersect(box)
        if common is not None:
            regions.append((common.within(stored.box), array[(*common.within(box).slices, ...)]))
    if not regions:
        return 0
    shape = stored.box.shape
    with PieceReader(directory, stored, piece_bytes) as reader:
        if len(regions) == 1 and is_contiguous(regions[0][0], shape) and regions[0][1].flags.c_contiguous:
            region, array = regions[0]
            reader.read_into(array.reshape(-1).view(np.uint8).data, _number(region.start, shape) * width)
            return reader.bytes_read
        for block in blocks(shape, width, [region for region, _ in regions], piece_bytes):
            start, stop = block.first * width, (block.first + block.box.size) * width
            data = reader.read(start, stop, block.low * width, block.high * width)
            elements = np.frombuffer(data, DTYPES[stored.info.dtype].bits).reshape(block.box.shape)
            for region, array in regions:
                common = block.box.intersect(region)
                if common is not None:
                    array[(*common.within(region).slices, ...)] = elements[(*common.within(block.box).slices, ...)]
        return reader.bytes_read


def bytes_to_read(stored: Box, width: int, piece_bytes: int, targets: Sequence[Box]) -> int:
    """The bytes that ``read_regions`` reads of a stored box for these targets. ``width``: bytes of an element.

    They are those of the pieces that have a byte of a target's element, each once.
    """
    regions = [common.within(stored) for target in targets if (common := stored.intersect(target)) is not None]
    num_bytes, end, total = stored.size * width, 0, 0
    for block in blocks(stored.shape, width, regions, piece_bytes):
        start = max(end, block.low * width // piece_bytes * piece_bytes)
        end = min(-(-block.high * width // piece_bytes) * piece_bytes, num_bytes)
        total += end - start
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A contiguous block of an array: ``box``, whose first element is number ``first`` of the array.

    ``low`` and ``high``: all elements of the block that a region has are numbers ``low`` to ``high`` of the array, without
    ``high``. Every piece in between has one.
    """

    box: Box
    first: int
    low: int
    high: int


def blocks(shape: Sequence[int], width: int, regions: Sequence[Box], piece_bytes: int) -> Iterator[Block]:
    """Contiguous blocks of an array that have all indices of the regions, in row-major order.

    A block is about ``BLOCK_BYTES`` long at most. Rows of at most a piece are in it completely, and their pieces are those that
    a region has, but for the first and the last; of longer rows a block has only what a region has.
    """
    if regions:
        yield from _blocks(tuple(shape), width, regions, piece_bytes, (), 0)


def _blocks(
    shape: tuple[int, ...], width: int, regions: Sequence[Box], piece_bytes: int, above: tuple[int, ...], first: int
) -> Iterator[Block]:
    dim = len(above)
    after = tuple(index + 1 for index in above)
    if dim == len(shape):
        yield Block(box=Box(above, after), first=first, low=first, high=first + 1)
        return
    inner = shape[dim + 1 :]
    row = prod(inner)
    if row * width > piece_bytes:
        for start, stop, inside in _ranges(regions, dim):
            for index in range(start, stop):
                yield from _blocks(shape, width, inside, piece_bytes, (*above, index), first + index * row)
        return
    rows = max(1, BLOCK_BYTES // (row * width))
    for start, stop, low, high in _runs(inner, width, _ranges(regions, dim), piece_bytes, first):
        for begin in range(start, stop, rows):
            end = min(begin + rows, stop)
            yield Block(
                box=Box((*above, begin, *[0] * len(inner)), (*after, end, *inner)),
                first=first + begin * row,
                low=max(low, first + begin * row),
                high=min(high, first + end * row),
            )


def _runs(
    inner: tuple[int, ...], width: int, ranges: Iterable[tuple[int, int, Sequence[Box]]], piece_bytes: int, first: int
) -> list[tuple[int, int, int, int]]:
    """Rows of at most a piece, as ``(start, stop, low, high)``: a range of rows, and the numbers of its elements that regions have.

    Every piece from ``low`` to ``high`` has an element of a region: among rows of the same regions because it is at least as
    long as a row, and ranges are joined only where no piece lies between them.
    """
    row, dims = prod(inner), len(inner)
    runs: list[tuple[int, int, int, int]] = []
    for start, stop, inside in ranges:
        low = first + start * row + min(_number(region.start[-dims:], inner) if dims else 0 for region in inside)
        last = max(_number([at - 1 for at in region.stop[-dims:]], inner) if dims else 0 for region in inside)
        high = first + (stop - 1) * row + last + 1
        if runs and runs[-1][1] == start and low * width // piece_bytes <= -(-runs[-1][3] * width // piece_bytes):
            runs[-1] = (runs[-1][0], stop, runs[-1][2], high)
        else:
            runs.append((start, stop, low, high))
    return runs


def _number(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number of an element in row-major order."""
    number = 0
    for at, size in zip(index, shape, strict=True):
        number = number * size + at
    return number


def _ranges(regions: Sequence[Box], dim: int) -> Iterator[tuple[int, int, Sequence[Box]]]:
    """The indices of a dim that regions have, as ascending ranges, each with the regions that have all of it."""
    waiting = sorted(regions, key=lambda region: region.start[dim], reverse=True)
    ends = sorted({end for region in regions for end in (region.start[dim], region.stop[dim])})
    inside: list[Box] = []
    for start, stop in pairwise(ends):
        inside = [region for region in inside if region.stop[dim] > start]
        while waiting and waiting[-1].start[dim] == start:
            inside.append(waiting.pop())
        if inside:
            yield start, stop, inside


def is_contiguous(region: Box, shape: Sequence[int]) -> bool:
    """Whether the elements of a region follow each other in an array of ``shape``."""
    sizes = region.shape
    dims = [dim for dim, size in enumerate(sizes) if size != shape[dim]]
    return not dims or all(size == 1 for size in sizes[: dims[-1]])


class PieceReader:
    """Reads ranges of one stored box, in ascending order, and verifies each piece before any of its bytes is returned.

    ``bytes_read``: so far. The last piece is kept, because the next range may begin in it.
    """

    def __init__(self, directory: Place, stored: StoredBox, piece_bytes: int) -> None:
        self._directory, self._stored, self._piece_bytes = directory, stored, piece_bytes
        self._block_bytes = max(BLOCK_BYTES, system_of(directory).request_bytes)
        self._kept: tuple[int, bytes | memoryview] = (-1, b"")
        self.bytes_read = 0
        try:
            self._file = open_regular(directory / stored.file)
        except OSError as error:
            raise read_error(directory, stored, error) from error

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def read(self, start: int, stop: int, low: int, high: int) -> memoryview:
        """Bytes ``start`` to ``stop`` of the box, of which only the pieces that have bytes ``low`` to ``high`` are read.

        What the other bytes are is not defined.
        """
        size, (number, kept) = self._piece_bytes, self._kept
        first, end = low // size * size, min(-(-high // size) * size, self._stored.num_bytes)
        base = min(start, first)
        data = empty((max(stop, end) - base,), np.dtype(np.uint8), self._place()).data
        pieces, done = data[first - base : end - base], 0
        if number == first // size:
            pieces[: len(kept)] = kept
            done = len(kept)
        self._fill(pieces[done:], first + done)
        last = (end - 1) // size
        tail = pieces[last * size - first :]
        # A copy, where the rest of the block would stay in memory with it.
        self._kept = (last, tail if len(tail) == len(data) else bytes(tail)) if high < end else (-1, b"")
        return data[start - base : stop - base]

    def read_into(self, target: memoryview, start: int) -> None:
        """Fills ``target`` with the bytes of the box from ``start`` on: complete pieces without a copy."""
        size, stop = self._piece_bytes, start + len(target)
        first = min(-(-start // size) * size, stop)
        end = stop if stop == self._stored.num_bytes else max(stop // size * size, first)
        if start < first:
            target[: first - start] = self.read(start, first, start, first)
            # No later range begins in this piece, and two of them would be in memory at once.
            self._kept = (-1, b"")
        step = max(self._block_bytes // size, 1) * size
        for low in range(first, end, step):
            high = min(low + step, end)
            self._fill(target[low - start : high - start], low)
        if end < stop:
            target[end - start :] = self.read(end, stop, end, stop)

    def verify(self) -> None:
        """Reads and verifies all pieces."""
        step = max(self._block_bytes // self._piece_bytes, 1) * self._piece_bytes
        for start in range(0, self._stored.num_bytes, step):
            stop = min(start + step, self._stored.num_bytes)
            self.read(start, stop, start, stop)

    def _fill(self, data: memoryview, start: int) -> None:
        """Fills ``data`` from byte ``start`` of the box, where a piece begins, and verifies it."""
        if len(data):
            proven(self._directory / self._stored.file, lambda: self._fill_once(data, start))
            self.bytes_read += len(data)

    def _fill_once(self, data: memoryview, start: int) -> None:
        stored, size = self._stored, self._piece_bytes
        filled = 0
        try:
            self._file.seek(stored.offset + start)
            # A single read stops at 2 GiB on Linux.
            while filled < len(data):
                count = self._file.readinto(data[filled:])
                if not count:
                    break
                filled += count
        except OSError as error:
            raise read_error(self._directory, stored, error) from error
        first = start // size
        wrong = first_mismatch(data, stored.digests[first : first + -(-len(data) // size)], size)
        if filled < len(data) and wrong is None:
            wrong = filled // size
        if wrong is not None:
            read = digest_of(data[wrong * size : min(filled, (wrong + 1) * size)])
            raise digest_error(self._directory, stored, (first + wrong) * size, size, read)

    def _place(self) -> str:
        return f"{self._directory / self._stored.file}: tensor '{self._stored.info.name}', box [{self._stored.box}]"


def digest_error(directory: Place, stored: StoredBox, start: int, piece_bytes: int, read: str) -> DamagedError:
    """The error of a piece whose bytes are not those that were saved. ``start``: its first byte in the box; ``read``: as of the error."""
    end = min(start + piece_bytes, stored.num_bytes)
    return DamagedError(
        f"{directory / stored.file}: tensor '{stored.info.name}', box [{stored.box}]: bytes {stored.offset + start} to "
        f"{stored.offset + end} do not match their digest: the file was damaged after it was written. "
        f"Restore it from a copy, or resume from another checkpoint.",
        read=read,
    )


def read_error(directory: Place, stored: StoredBox, error: OSError) -> CheckpointError:
    """The error of a box that cannot be read at all."""
    return CheckpointError(
        f"{directory / stored.file}: tensor '{stored.info.name}', box [{stored.box}]: cannot be read: {error.strerror}."
    )


def empty(shape: tuple[int, ...], dtype: np.dtype, place: str) -> np.ndarray:
    """A new array. Raises CheckpointError where there is too little memory for it."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        num_bytes = prod(shape) * dtype.itemsize
        raise CheckpointError(f"{place}: {num_bytes:,} bytes, for which there is not enough memory.") from error
