"""Small safetensors files of integers: the part of each process, and the index. Written at once, and read at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.fields import parse_json
from shardwright.checkpoint.format.header import METADATA, safetensors_header
from shardwright.storage.url import Place

MAX_BYTES = 1 << 30
"""The largest file of integers that is read: some ten million boxes."""
BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values()}


def arrays_bytes(arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file. Elements are little-endian; arrays of wide elements come first."""
    ordered = sorted(arrays.items(), key=lambda item: -item[1].itemsize)
    header = safetensors_header(
        ((name, array.dtype.name, array.shape, array.nbytes) for name, array in ordered), metadata
    )
    return header + b"".join(
        np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<")).tobytes() for _, array in ordered
    )


def read_arrays(
    path: Place, data: bytes, needed: Mapping[str, tuple[str, int]]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays and the metadata of a file's bytes. ``needed``: name to (dtype, number of dims). No other array may be there.

    Raises CheckpointError with the place.
    """
    num = int.from_bytes(data[:8], "little")
    if len(data) < 8 or num > len(data) - 8:
        raise CheckpointError(f"{path}: has {len(data):,} bytes, which is not a complete safetensors file.")
    top = parse_json(data[8 : 8 + num], path)
    found: dict[str, np.ndarray] = {}
    for name, (dtype, num_dims) in needed.items():
        item = top[name]
        start, stop = item["data_offsets"].integers(2)
        shape, bits = item["shape"].integers(num_dims), np.dtype(dtype)
        if item["dtype"].text() != DTYPES[dtype].safetensors:
            raise item["dtype"].error(f"found '{item['dtype'].text()}', needed '{DTYPES[dtype].safetensors}'.")
        size = 1
        for length in shape:
            size *= length
        if stop - start != size * bits.itemsize or stop > len(data) - 8 - num:
            raise item["data_offsets"].error(
                f"found {start} to {stop}, needed {size * bits.itemsize} bytes within the file."
            )
        found[name] = (
            np.frombuffer(data, bits.newbyteorder("<"), size, 8 + num + start).astype(bits, copy=False).reshape(shape)
        )
    for name in top.mapping():
        if name not in needed and name != METADATA:
            raise top[name].error("no such array is known.")
    metadata = top[METADATA]
    return found, {key: metadata[key].text() for key in metadata.mapping()}
