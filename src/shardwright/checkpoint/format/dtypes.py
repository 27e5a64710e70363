"""The dtypes a checkpoint can hold, by the names that NumPy, ml_dtypes, JAX and PyTorch share.

A tensor is bytes and the name of a dtype. Dtypes that NumPy itself lacks (``bfloat16``, the float8 family) do not
need their library here: writing needs only the array; for reading, the caller must have imported the library.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from shardwright.checkpoint.format.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """One dtype: its name, its name in the safetensors format, and the bytes of one element."""

    name: str
    safetensors: str
    num_bytes: int

    @property
    def bits(self) -> np.dtype:
        """The unsigned integer of the same width, to move elements without interpreting them."""
        return np.dtype(f"<u{self.num_bytes}")

    @property
    def raw(self) -> np.dtype:
        """Opaque elements of the same width, which cannot be mistaken for numbers."""
        return np.dtype(f"V{self.num_bytes}")


DTYPES: Mapping[str, Dtype] = {
    name: Dtype(name=name, safetensors=code, num_bytes=num_bytes)
    for name, code, num_bytes in (
        ("bool", "BOOL", 1),
        ("uint8", "U8", 1),
        ("int8", "I8", 1),
        ("uint16", "U16", 2),
        ("int16", "I16", 2),
        ("uint32", "U32", 4),
        ("int32", "I32", 4),
        ("uint64", "U64", 8),
        ("int64", "I64", 8),
        ("float8_e4m3fn", "F8_E4M3", 1),
        ("float8_e5m2", "F8_E5M2", 1),
        ("float8_e8m0fnu", "F8_E8M0", 1),
        ("float16", "F16", 2),
        ("bfloat16", "BF16", 2),
        ("float32", "F32", 4),
        ("float64", "F64", 8),
        ("complex64", "C64", 8),
    )
}


WIDTHS = (1, 2, 4, 8)
TILE = (64, 256)
"""Indices of the dim whose elements follow each other in memory, and of the last dim: a tile is in the cache of a core."""


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The array's elements as they are stored: a flat ``uint8`` array, row-major and little-endian.

    Copies only if the array does not have this memory layout already.
    """
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return _row_major(array).reshape(-1).view(np.uint8)


def _row_major(array: np.ndarray) -> np.ndarray:
    """The same array, or a copy of it in tiles: NumPy copies transposed dims element by element through the cache."""
    if array.flags.c_contiguous or array.ndim < 2 or array.itemsize not in WIDTHS:
        return np.ascontiguousarray(array)
    bits = array.view(f"u{array.itemsize}")
    copy = np.empty(array.shape, bits.dtype)
    last = array.ndim - 1
    fastest = min(range(array.ndim), key=lambda dim: (array.shape[dim] == 1, abs(array.strides[dim])))
    sizes: dict[int, int] = {fastest: TILE[0], last: TILE[1]} if fastest != last else {}
    ranges = [range(0, size, sizes[dim] if dim in sizes else max(size, 1)) for dim, size in enumerate(array.shape)]
    for start in product(*ranges):
        tile = tuple(slice(at, at + each.step) for at, each in zip(start, ranges, strict=True))
        copy[tile] = bits[tile]
    return copy


def numpy_dtype(dtype: Dtype, tensor: str) -> np.dtype:
    """NumPy's dtype of that name. Raises CheckpointError if the library that defines it is not imported."""
    try:
        return np.dtype(dtype.name)
    except TypeError as error:
        raise CheckpointError(
            f"tensor '{tensor}' is stored as {dtype.name}, which NumPy knows only once ml_dtypes is imported. "
            f"Import ml_dtypes first, or read it with raw=True.",
            code="SW504",
        ) from error
