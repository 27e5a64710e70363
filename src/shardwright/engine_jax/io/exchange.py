"""Bytes from every process to every other, for loads that processes do together; a ``Carrier`` of the checkpoint store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "process"
MOST_BYTES = 16 << 20
"""So many bytes a process sends in one all-to-all, in which it sends as many to each: they are padded."""

SMALLEST, FACTOR = 1 << 12, 16
"""The bytes to one process are padded to ``SMALLEST`` times a power of ``FACTOR``: each length is a program to compile."""


class ProcessCarrier:
    """The processes that ``jax.distributed`` connects, each with one of its devices."""

    noun = "process"

    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        first: dict[int, Any] = {}
        for device in jax.devices():
            first.setdefault(device.process_index, device)
        self._mesh = Mesh(np.array([first[process] for process in range(self.count)]), (AXIS,))
        self._device = first[self.index]

    def largest(self, number: int) -> int:
        return int(self._local(_largest(self._mesh)(self._global(np.array([number], np.int32))))[0])

    def texts(self, text: str) -> Sequence[str]:
        return [data.decode() for data in gathered(text.encode())]

    def exchange(self, sent: np.ndarray, to: Sequence[int], sent_here: Sequence[int]) -> np.ndarray:
        longest = self.largest(max(to))
        length = SMALLEST
        while length < longest:
            length *= FACTOR
        length = min(length, max(SMALLEST, MOST_BYTES // self.count))
        places, arriving = _ends(to), _ends(sent_here)
        arrived = np.empty(sum(sent_here), np.uint8)
        for start in range(0, longest, length):
            rows = np.zeros((1, self.count, length), np.uint8)
            for process, (place, size) in enumerate(zip(places, to, strict=True)):
                part = sent[place + start : place + min(size, start + length)] if start < size else sent[:0]
                rows[0, process, : len(part)] = part
            found = self._local(_exchanged(self._mesh)(self._global(rows)))
            for process, (place, size) in enumerate(zip(arriving, sent_here, strict=True)):
                if start < size:
                    part = found[0, process, : min(size - start, length)]
                    arrived[place + start : place + start + len(part)] = part
        return arrived

    def _global(self, local: np.ndarray) -> jax.Array:
        shape = (self.count * local.shape[0], *local.shape[1:])
        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return jax.make_array_from_single_device_arrays(shape, sharding, [jax.device_put(local, self._device)])

    def _local(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array.addressable_shards[0].data)


def gathered(data: bytes) -> list[bytes]:
    """What every process gives, by process. It is a barrier too."""
    count = jax.process_count()
    own = np.frombuffer(data, np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.asarray([len(own)], np.int32))).reshape(-1)
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(own)] = own
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(count, -1)
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _ends(sizes: Sequence[int]) -> list[int]:
    """Where each begins, if they follow each other."""
    ends = np.cumsum([0, *sizes])
    return ends[:-1].tolist()


@cache
def _largest(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(
        jax.shard_map(
            lambda one: jax.lax.pmax(one, AXIS), mesh=mesh, in_specs=PartitionSpec(AXIS), out_specs=PartitionSpec()
        )
    )


@cache
def _exchanged(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec(AXIS)

    def exchanged(rows: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(rows, AXIS, split_axis=1, concat_axis=1, tiled=True)

    return jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=spec, out_specs=spec))
