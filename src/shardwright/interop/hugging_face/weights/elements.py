"""Elements of a published tensor in our dims: any box of a piece, in another dtype, and dequantised where they are FP8."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.reading.casting import cast
from shardwright.core.boxes.box import Box
from shardwright.interop.hugging_face.weights.files.folder import Folder
from shardwright.interop.hugging_face.weights.mapping import Piece
from shardwright.models.hugging_face import published_dims

CHUNK_ELEMENTS = 1 << 21
"""So many elements are read at a time. FP8 elements are dequantised in float32, so memory is several times their bytes."""


def read_piece(folder: Folder, name: str, piece: Piece, inner: Box, dtype: str) -> np.ndarray:
    """A box of a piece of a published tensor, in our dims without the piece's index: unsigned integers of the dtype's bits.

    As ``read_parts`` for one box.
    """
    elements = np.empty(inner.shape, DTYPES[dtype].bits)
    read_parts(folder, name, piece, [(inner, elements)], dtype)
    return elements


def read_parts(folder: Folder, name: str, piece: Piece, parts: Sequence[tuple[Box, np.ndarray]], dtype: str) -> None:
    """Fills arrays from boxes within a piece of a published tensor, in our dims without the piece's index.

    Only rows of the published tensor that a box has elements of are read, each once. The arrays are unsigned integers of the
    dtype's bits.

    Raises InputError where the file cannot be read.
    """
    axes, dims = published_dims(piece.weight)
    flat = [axis for dim in dims for axis in dim]
    sizes = [piece.weight.size(axis) for axis in flat]
    order = [axes.index(axis) for axis in flat]
    # In the order of the published dims.
    boxes = [Box(*(tuple(corner[at] for at in order) for corner in (box.start, box.stop))) for box, _ in parts]
    found, scales = folder.tensors[name], folder.scales_of(name)
    row = prod(sizes[1:])
    for first, last in _chunks([(box.start[0], box.stop[0]) for box in boxes], max(1, CHUNK_ELEMENTS // row)):
        place = piece.start + first * row
        bits, source = found.read(place, (last - first) * row), found.known.name
        if scales is not None:
            values = scales.dequantized(bits.reshape(-1, scales.shape[1]), place)
            bits, source = values.view(np.uint32), "float32"
        rows, read = bits.reshape(last - first, *sizes[1:]), Box((first, *[0] * (len(sizes) - 1)), (last, *sizes[1:]))
        for box, (_, array) in zip(boxes, parts, strict=True):
            common = box.intersect(read)
            if common is not None:
                target = array.transpose(order)[common.within(box).slices]
                target[...] = cast(rows[common.within(read).slices], source, dtype)


def _chunks(ranges: Sequence[tuple[int, int]], step: int) -> Iterator[tuple[int, int]]:
    """The indices of all ranges, each once, at most ``step`` at a time.

    >>> list(_chunks([(4, 9), (0, 2), (1, 3)], 4))
    [(0, 3), (4, 8), (8, 9)]
    """
    done = 0
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= done:
            joined[-1] = (joined[-1][0], max(done, stop))
        else:
            joined.append((start, stop))
        done = joined[-1][1]
    for start, stop in joined:
        for first in range(start, stop, step):
            yield first, min(first + step, stop)


def read_tensor(folder: Folder, name: str) -> np.ndarray:
    """A tensor as it is published, as unsigned integers of the bits of ``folder.dtype(name)``: dequantised where it is FP8.

    Raises InputError where the file cannot be read.
    """
    found, scales = folder.tensors[name], folder.scales_of(name)
    if scales is None:
        return found.read(0, prod(found.shape)).reshape(found.shape)
    rows, row = scales.shape
    num, dtype = prod(found.shape) // row, folder.dtype(name)
    elements = np.empty((num, row), DTYPES[dtype].bits)
    first, step = 0, max(1, CHUNK_ELEMENTS // row)
    while first < num:
        last = min(first + step, (first // rows + 1) * rows)
        values = scales.dequantized(found.read(first * row, (last - first) * row).reshape(-1, row), first * row)
        elements[first:last] = cast(values.view(np.uint32), "float32", dtype)
        first = last
    return elements.reshape(found.shape)
