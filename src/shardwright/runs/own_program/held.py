"""A tensor as one process holds it: boxes of it, whose elements are read when they are written or compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import xxhash

from shardwright.checkpoint import CheckpointError, OwnedBox, TensorInfo
from shardwright.checkpoint.writing.data_file import Lasts
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import ShardwrightError


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A box that this process holds. ``read``: its elements in the box's shape, opaque or in the tensor's dtype.

    ``lasts`` and ``copy``: as of ``OwnedBox``.
    """

    box: Box
    read: Callable[[], np.ndarray]
    lasts: Lasts = "now"
    copy: Callable[[np.ndarray | None], np.ndarray] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTensor:
    """A tensor and what this process holds of it: often one box, none, or the same box on several devices."""

    info: TensorInfo
    shards: tuple[HeldShard, ...]

    def replicas(self) -> Iterator[tuple[str, tuple[HeldShard, ...]]]:
        """Each different box by a key that is the same in all processes, with the shards that hold it."""
        ordered = sorted((one for one in self.shards if one.box.size), key=lambda one: one.box)
        for box, shards in groupby(ordered, key=lambda one: one.box):
            yield str(box), tuple(shards)


def read(name: str, shard: HeldShard) -> np.ndarray:
    """The elements of a shard. Raises CheckpointError for whatever goes wrong, with the tensor's name."""
    return _explained(name, shard, shard.read)


def owned(name: str, shard: HeldShard) -> OwnedBox:
    """The box as its owner passes it to a save."""
    copy = shard.copy
    return OwnedBox(
        name=name,
        box=shard.box,
        array=lambda: read(name, shard),
        lasts=shard.lasts,
        copy=None if copy is None else lambda earlier: _explained(name, shard, lambda: copy(earlier)),
    )


def _explained(name: str, shard: HeldShard, do: Callable[[], np.ndarray]) -> np.ndarray:
    try:
        return do()
    except ShardwrightError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"tensor '{name}', box [{shard.box}]: its elements cannot be read: {type(error).__name__}: {error}"
        ) from error


def digest(array: np.ndarray) -> str:
    """XXH3, 128 bits, in hex, of the elements of an array."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
