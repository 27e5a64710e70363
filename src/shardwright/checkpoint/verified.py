"""Reads stored boxes and verifies each against its digest."""

from __future__ import annotations

from collections import OrderedDict
from math import prod
from pathlib import Path
from threading import Lock

import numpy as np

from shardwright.checkpoint.format.data_file import CHUNK_BYTES
from shardwright.checkpoint.format.dtypes import Dtype
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import StoredBox, digest_of
from shardwright.checkpoint.format.regular_file import open_regular

CACHE_BYTES = 1 << 30


class VerifiedBoxes:
    """Reads entire stored boxes, verifies them, and caches the last ones for later reads of any region of them.

    This is the only mutable object here: a cache of at most ``cache_bytes`` (a larger box is cached alone).
    Threads may share it; one thread at a time reads and verifies.
    """

    __slots__ = ("_cache", "_cache_bytes", "_directory", "_held_bytes", "_lock")

    def __init__(self, directory: Path, cache_bytes: int = CACHE_BYTES) -> None:
        self._directory = directory
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[tuple[str, int], np.ndarray] = OrderedDict()
        self._held_bytes = 0
        self._lock = Lock()

    def read(self, tensor: str, stored: StoredBox, dtype: Dtype) -> np.ndarray:
        """The elements of a stored box, as read-only unsigned integers of the dtype's width, in the box's shape.

        Raises DamagedError if the bytes are not those that were saved, CheckpointError if they cannot be read.
        """
        key = (stored.file, stored.offset)
        with self._lock:
            data = self._cache.get(key)
            if data is None:
                data = _read_verified(self._directory, tensor, stored)
                self._cache[key] = data
                self._held_bytes += data.nbytes
                while self._held_bytes > self._cache_bytes and len(self._cache) > 1:
                    self._held_bytes -= self._cache.popitem(last=False)[1].nbytes
            self._cache.move_to_end(key)
        return data.view(dtype.bits).reshape(stored.box.shape)


def digest_error(directory: Path, tensor: str, stored: StoredBox) -> DamagedError:
    """The error of a box whose bytes are not those that were saved."""
    return DamagedError(
        f"{directory / stored.file}: tensor '{tensor}', box [{stored.box}]: bytes {stored.offset} to "
        f"{stored.offset + stored.num_bytes} do not match their digest: the file was damaged after it was written. "
        f"Restore it from a copy, or resume from another checkpoint."
    )


def read_error(directory: Path, tensor: str, stored: StoredBox, error: OSError) -> CheckpointError:
    """The error of a box that cannot be read at all."""
    return CheckpointError(
        f"{directory / stored.file}: tensor '{tensor}', box [{stored.box}]: cannot be read: {error.strerror}."
    )


def empty(shape: tuple[int, ...], dtype: np.dtype, place: str) -> np.ndarray:
    """A new array. Raises CheckpointError where there is too little memory for it."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        num_bytes = prod(shape) * dtype.itemsize
        raise CheckpointError(f"{place}: {num_bytes:,} bytes, for which there is not enough memory.") from error


def _read_verified(directory: Path, tensor: str, stored: StoredBox) -> np.ndarray:
    data = empty(
        (stored.num_bytes,), np.dtype(np.uint8), f"{directory / stored.file}: tensor '{tensor}', box [{stored.box}]"
    )
    view = data.data
    filled = 0
    try:
        with open_regular(directory / stored.file) as file:
            file.seek(stored.offset)
            # A single read stops at 2 GiB on Linux.
            while filled < stored.num_bytes:
                count = file.readinto(view[filled : filled + 16 * CHUNK_BYTES])
                if not count:
                    break
                filled += count
    except OSError as error:
        raise read_error(directory, tensor, stored, error) from error
    if filled < stored.num_bytes or digest_of(data) != stored.digest:
        raise digest_error(directory, tensor, stored)
    data.flags.writeable = False
    return data
