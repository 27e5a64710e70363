"""How Orbax writes an array that is read box by box: a leaf of its own type, and the handler that Orbax calls for it.

Orbax's handlers need all arrays in memory. This one writes what Orbax's handler of NumPy arrays writes, to the same places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import jax
import numpy as np

from shardwright.core.boxes.box import Box

CHUNK_BYTES = 32 << 20
"""The largest chunk of an array."""
PENDING_BYTES = 64 << 20
"""What is written at one time: many small arrays, or some chunks."""


class BoxedArray:
    """An array whose boxes are read when they are written. ``read``: the elements of one."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, read: Callable[[Box], np.ndarray]) -> None:
        self.shape, self.dtype, self.read = shape, dtype, read
        self.ndim, self.size = len(shape), prod(shape)
        self.nbytes = self.size * dtype.itemsize

    @property
    def chunk(self) -> tuple[int, ...]:
        """The shape of its chunks: rows of the first dim of which a row fits, one index of each dim before it."""
        chunk = list(self.shape)
        for dim, size in enumerate(self.shape):
            rest = max(1, prod(self.shape[dim + 1 :]) * self.dtype.itemsize)
            chunk[dim] = min(size, max(1, CHUNK_BYTES // rest))
            if rest <= CHUNK_BYTES:
                break
        return tuple(chunk)

    def boxes(self) -> Iterator[Box]:
        chunk = self.chunk
        starts = (range(0, size, max(1, step)) for size, step in zip(self.shape, chunk, strict=True))
        for start in product(*starts):
            yield Box(start, tuple(min(a + b, c) for a, b, c in zip(start, chunk, self.shape, strict=True)))


def registry() -> Any:
    """The types of leaves that an export has, each with Orbax's own handler but for ``BoxedArray``."""
    import orbax.checkpoint as ocp
    import tensorstore

    class BoxedArrayHandler(ocp.type_handlers.NumpyHandler):
        """Writes the boxes of each array in turn. It is restored as a NumPy array, or as what the caller asks for."""

        async def serialize(
            self, values: Sequence[Any], infos: Sequence[Any], args: Sequence[Any] | None = None
        ) -> list[Any]:
            """All is written when it returns. Raises what reading a box raises."""
            del args
            pending, num_bytes = [], 0
            for value, info in zip(values, infos, strict=True):
                await info.await_path_creation()
                spec = ocp.type_handlers.get_json_tspec_write(
                    info,
                    use_ocdbt=info.is_ocdbt_checkpoint,
                    global_shape=value.shape,
                    local_shape=value.chunk,
                    dtype=value.dtype,
                    process_index=jax.process_index(),
                )
                opened = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
                for box in value.boxes():
                    array = value.read(box)
                    pending.append(opened[box.slices].write(array) if box.start else opened.write(array))
                    num_bytes += array.nbytes
                    if num_bytes >= PENDING_BYTES:
                        for one in pending:
                            await one
                        pending, num_bytes = [], 0
            for one in pending:
                await one
            return []

    own = (int, float, str, jax.Array)
    return ocp.type_handlers.create_type_handler_registry(
        *((kind, ocp.type_handlers.get_type_handler(kind)) for kind in own), (BoxedArray, BoxedArrayHandler())
    )
