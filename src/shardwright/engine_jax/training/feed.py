"""From the rows of a step to its arrays, sharded over devices as the plan says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding

from shardwright.core.plan.plan import Plan
from shardwright.data import Batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """The sharding of a step's rows and tokens, and the rows that this process needs: those of its own devices.

    ``shape``: rows and tokens of the global step. ``offsets``: of these rows from the step's first one, ascending.
    """

    sharding: NamedSharding
    shape: tuple[int, int]
    offsets: tuple[int, ...]

    def on_devices(self, batch: Batch) -> Mapping[str, jax.Array]:
        """The arrays of a step, [batch, length], with each device's own rows and tokens on it."""
        return {name: self._placed(array) for name, array in batch.arrays.items()}

    def _placed(self, array: np.ndarray) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            # A device's rows are contiguous in the step, so they are contiguous among the rows that were read.
            first, stop, _ = index[0].indices(self.shape[0])
            start = bisect_left(self.offsets, first)
            return array[start : start + stop - first, index[1]]

        return jax.make_array_from_callback(self.shape, self.sharding, shard)


def feed_of(plan: Plan, sharding: NamedSharding) -> Feed:
    """The feed of this process in a run of ``plan``."""
    shape = (plan.request.batch, plan.request.length)
    indices = [index for index in sharding.addressable_devices_indices_map(shape).values() if index is not None]
    offsets = {offset for index in indices for offset in range(*index[0].indices(shape[0]))}
    return Feed(sharding=sharding, shape=shape, offsets=tuple(sorted(offsets)))
