"""Elements of a published tensor in our dims: any box of a piece, in another dtype, and dequantised where they are FP8."""

from __future__ import annotations

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

    ``inner``: within the piece. Only rows of the published tensor that the box has elements of are read; only those elements
    are kept.

    Raises InputError where the file cannot be read.
    """
    axes, dims = published_dims(piece.weight)
    flat = [axis for dim in dims for axis in dim]
    sizes = [piece.weight.size(axis) for axis in flat]
    start, stop = (tuple(corner[axes.index(axis)] for axis in flat) for corner in (inner.start, inner.stop))
    kept = tuple(slice(*along) for along in zip(start[1:], stop[1:], strict=True))
    found, scales = folder.tensors[name], folder.scales_of(name)
    row = prod(sizes[1:])
    step = max(1, CHUNK_ELEMENTS // row)
    elements = np.empty([b - a for a, b in zip(start, stop, strict=True)], DTYPES[dtype].bits)
    for first in range(start[0], stop[0], step):
        last = min(first + step, stop[0])
        place = piece.start + first * row
        bits, source = found.read(place, (last - first) * row), found.known.name
        if scales is not None:
            values = scales.dequantized(bits.reshape(-1, scales.shape[1]), place)
            bits, source = values.view(np.uint32), "float32"
        rows = bits.reshape(last - first, *sizes[1:])[(slice(None), *kept)]
        elements[first - start[0] : last - start[0]] = cast(rows, source, dtype)
    return np.ascontiguousarray(elements.transpose([flat.index(axis) for axis in axes]))


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
