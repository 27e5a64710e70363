"""Copies of boxes in host memory, which a thread writes while training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.writing.data_file import OwnedBox
from shardwright.core.boxes.box import Box

MOST_THREADS = 4


class HostCopies:
    """Copies of boxes in host memory, which are reused by the next save: as many bytes as this process saves."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], np.ndarray] = {}

    def of(self, boxes: Iterable[OwnedBox]) -> list[OwnedBox]:
        """The same boxes with arrays that no later step changes: copies, but of those that last. Raises CheckpointError if host memory is too small."""
        # NumPy copies without Python's lock: one thread does not use the bandwidth of the memory.
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            copies = list(threads.map(self._lasting, boxes))
        # A program may save other tensors than before.
        used = {(owned.name, owned.box) for owned in copies}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in used}
        return copies

    def _lasting(self, owned: OwnedBox) -> OwnedBox:
        return owned if owned.lasting else replace(owned, array=self._copy(owned))

    def _copy(self, owned: OwnedBox) -> np.ndarray:
        array = np.asarray(owned.array() if callable(owned.array) else owned.array)
        key = (owned.name, owned.box)
        buffer = self._buffers.get(key)
        if (
            buffer is None
            or buffer.dtype != array.dtype
            or buffer.shape != array.shape
            or _order(buffer) != _order(array)
        ):
            try:
                # In the order that the elements have in memory: the thread that writes them may transpose, the step does not wait for it.
                buffer = self._buffers[key] = np.empty_like(array)
            except MemoryError as error:
                raise CheckpointError(
                    f"'{owned.name}', box [{owned.box}]: host memory has no {array.nbytes:,} bytes for a copy of it. "
                    f"Save without a copy: not asynchronously."
                ) from error
        # NumPy copies opaque elements one by one, and integers in one go.
        bits = np.dtype(f"u{array.dtype.itemsize}")
        np.copyto(buffer.view(bits), array.view(bits))
        return buffer


def _order(array: np.ndarray) -> list[int]:
    """The dims from the outermost to the innermost in memory, without those of one index."""
    return sorted((dim for dim in range(array.ndim) if array.shape[dim] > 1), key=lambda dim: -abs(array.strides[dim]))
