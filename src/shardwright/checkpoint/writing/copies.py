"""Copies of boxes in host memory, which a thread writes while training goes on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import numpy as np

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.writing.data_file import OwnedBox
from shardwright.core.boxes.box import Box

MOST_THREADS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Copying:
    """Copies under way. ``boxes``: the same boxes, whose arrays are their copies: who asks for one that is not complete waits for it,
    and gets the CheckpointError of one that failed."""

    boxes: Sequence[OwnedBox] = ()
    under_way: Sequence[Future[np.ndarray]] = ()

    def wait(self) -> None:
        """Wait until nothing is copied any more. Raises nothing."""
        wait(self.under_way)


class HostCopies:
    """Copies of boxes in host memory, which are reused by the next save: as many bytes as this process saves."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, Box], np.ndarray] = {}
        self._last = Copying()

    def begin(self, boxes: Iterable[OwnedBox]) -> Copying:
        """Begin to copy boxes, but those that last always. Returns when those that may change from now on are copied.

        No copy of an earlier call may be in use any more.
        """
        self._last.wait()
        boxes = list(boxes)
        # A program may save other tensors than before.
        used = {(owned.name, owned.box) for owned in boxes}
        self._buffers = {key: buffer for key, buffer in self._buffers.items() if key in used}
        # NumPy copies without Python's lock: one thread does not use the bandwidth of the memory.
        threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), "shardwright copy")
        first = [owned for owned in boxes if owned.lasts == "now"]
        later = [owned for owned in boxes if owned.lasts == "until the update"]
        futures = {id(owned): threads.submit(self._copy, owned) for owned in (*first, *later)}
        # The threads end when all is copied.
        threads.shutdown(wait=False)
        self._last = Copying(
            boxes=[
                owned
                if owned.lasts == "always"
                else replace(owned, array=futures[id(owned)].result, copy=None, lasts="always")
                for owned in boxes
            ],
            under_way=list(futures.values()),
        )
        wait([futures[id(owned)] for owned in first])
        return self._last

    def _copy(self, owned: OwnedBox) -> np.ndarray:
        key = (owned.name, owned.box)
        earlier = self._buffers.get(key)
        try:
            if owned.copy is not None:
                found = owned.copy(earlier)
            else:
                found = copied(np.asarray(owned.array() if callable(owned.array) else owned.array), earlier)
        except MemoryError as error:
            raise CheckpointError(
                f"'{owned.name}', box [{owned.box}]: host memory has no room for a copy of it: {error}. "
                f"Save without a copy: not asynchronously."
            ) from error
        self._buffers[key] = found
        return found


def copied(array: np.ndarray, earlier: np.ndarray | None) -> np.ndarray:
    """A copy of an array: in the memory of an earlier one, if it has the same dtype, shape and order of dims. Raises MemoryError."""
    fits = (
        earlier is not None
        and (earlier.dtype, earlier.shape) == (array.dtype, array.shape)
        and _order(earlier) == _order(array)
    )
    # In the order that the elements have in memory: the thread that writes them may transpose, the step does not wait for it.
    buffer = earlier if earlier is not None and fits else np.empty_like(array)
    # NumPy copies opaque elements one by one, and integers in one go.
    bits = np.dtype(f"u{array.dtype.itemsize}")
    np.copyto(buffer.view(bits), array.view(bits))
    return buffer


def _order(array: np.ndarray) -> list[int]:
    """The dims from the outermost to the innermost in memory, without those of one index."""
    return sorted((dim for dim in range(array.ndim) if array.shape[dim] > 1), key=lambda dim: -abs(array.strides[dim]))
