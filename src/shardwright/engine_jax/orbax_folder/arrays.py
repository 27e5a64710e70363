"""The arrays and values of a folder of Orbax, read by TensorStore, box by box."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from shardwright.checkpoint import CheckpointError
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.engine_jax.orbax_folder.folder import STRINGS, Leaf, OrbaxFolder

BOX_BYTES = 64 << 20
"""Chunks are read together up to this many bytes."""
CACHE_BYTES = 64 << 20
"""Of the nodes of a database, which each array needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """An array. ``chunk``: the shape of its chunks. ``read``: the elements of a box."""

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    read: Callable[[Box], np.ndarray]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].num_bytes

    def boxes(self) -> Iterator[Box]:
        """The array in boxes of chunks, each of at most ``BOX_BYTES`` or one chunk."""
        if not prod(self.shape):
            return
        sizes = [min(a, b) for a, b in zip(self.chunk, self.shape, strict=True)]
        width = DTYPES[self.dtype].num_bytes
        for dim in reversed(range(len(sizes))):
            room = BOX_BYTES // max(1, prod(sizes) * width)
            sizes[dim] = min(self.shape[dim], sizes[dim] * max(1, room))
            if sizes[dim] < self.shape[dim]:
                break
        starts = (range(0, size, step) for size, step in zip(self.shape, sizes, strict=True))
        for start in product(*starts):
            yield Box(start, tuple(min(a + b, c) for a, b, c in zip(start, sizes, self.shape, strict=True)))


class Reader:
    """Reads leaves of one folder. Errors of TensorStore become a CheckpointError that names folder and leaf."""

    def __init__(self, folder: OrbaxFolder) -> None:
        import tensorstore

        self._folder, self._store = folder, tensorstore
        self._context = tensorstore.Context({"cache_pool#ocdbt": {"total_bytes_limit": CACHE_BYTES}})

    def array(self, leaf: Leaf) -> StoredArray:
        """An array, whose dtype may be one that our format does not have."""
        opened = self._opened(
            leaf,
            {
                "driver": "zarr3" if self._folder.is_zarr3 else "zarr",
                "kvstore": self._place(leaf),
                # Of newer folders every chunk is stored: one that is missing was lost.
                "fill_missing_data_reads": self._folder.fills,
            },
        )
        if opened.ndim and tuple(opened.domain.origin) != (0,) * opened.ndim:
            raise self._error(leaf, "its first index is not 0")

        def read(box: Box) -> np.ndarray:
            return np.asarray(self._read(leaf, opened[box.slices] if box.start else opened))

        return StoredArray(
            shape=tuple(opened.shape),
            dtype=opened.dtype.name,
            chunk=tuple(opened.chunk_layout.write_chunk.shape or opened.shape),
            read=read,
        )

    def text(self, leaf: Leaf) -> str:
        """A text, which Orbax keeps in a file of its own."""
        path = os.fspath(self._folder.path / STRINGS)
        spec = {
            "driver": "json",
            "kvstore": {"driver": "file", "path": path},
            "json_pointer": f"/{leaf.stored_name}",
        }
        return str(np.asarray(self._read(leaf, self._opened(leaf, spec))).item())

    def _place(self, leaf: Leaf) -> dict[str, Any]:
        name, path = leaf.stored_name, os.fspath(self._folder.path)
        if self._folder.is_database:
            base = {"driver": "file", "path": f"{path}/"}
            return {"driver": "ocdbt", "base": base, "path": f"{name}/", "cache_pool": "cache_pool#ocdbt"}
        if ".." in PurePosixPath(name).parts or name.startswith("/"):
            raise self._error(leaf, "its name is a path outside of the folder")
        return {"driver": "file", "path": f"{path}/{name}/"}

    def _opened(self, leaf: Leaf, spec: dict[str, Any]) -> Any:
        try:
            return self._store.open(spec, open=True, read=True, context=self._context).result()
        except (ValueError, OSError, NotImplementedError) as error:
            raise self._error(leaf, f"cannot be opened: {_first(error)}") from error

    def _read(self, leaf: Leaf, opened: Any) -> Any:
        try:
            return opened.read().result()
        except (ValueError, OSError, MemoryError) as error:
            raise self._error(leaf, f"cannot be read: {_first(error)}") from error

    def _error(self, leaf: Leaf, message: str) -> CheckpointError:
        return CheckpointError(f"{self._folder.path}: '{leaf.name}': {message}.")


def _first(error: Exception) -> str:
    """The first sentence of TensorStore's message, which goes on with where in its sources it is from."""
    return str(error).split(" [", 1)[0].strip().rstrip(".")[:400]
