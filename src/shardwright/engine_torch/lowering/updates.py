"""The update of weights, where axes shard it and not the weights (``core/plan/fsdp_groups.py``): the gradients of a group are
reduce-scattered, a rank updates its own part of each weight, and the parts are gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from shardwright.core.plan.fsdp_groups import UpdateGroup, WeightOfLayer, component_of
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.io.private import all_gather, reduce_scatter
from shardwright.engine_torch.io.scopes import moving

Shards = Mapping[str, torch.Tensor]


class Updated:
    """A group on one rank. All arguments are local shards by the keys of its weights."""

    def __init__(self, group: UpdateGroup, ranks: Ranks) -> None:
        self.group, self._ranks = group, ranks
        self._peers = [ranks.peers(axes) for axes in group.splits]
        self._made: dict[str, torch.Tensor] = {}
        self._held: list[torch.Tensor] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(one.key for one in self.group.weights)

    @property
    def in_microbatches(self) -> bool:
        """Whether gradients are scattered in each microbatch."""
        return self.group.num_in_microbatches > 0

    def scatter(self, key: str, gradient: torch.Tensor) -> bool:
        """Take the gradient of a weight in a microbatch. With the last one of the group, all are scattered, and added to those before."""
        self._made[key] = gradient
        if len(self._made) < len(self.group.weights):
            return False
        shards = self._scattered([self._made.pop(key) for key in self.keys], 0)
        if self._held is None:
            self._held = shards
        else:
            for total, shard in zip(self._held, shards, strict=True):
                total += shard
        return True

    def held(self, key: str) -> torch.Tensor:
        """The gradient of a weight, scattered and summed over microbatches."""
        assert self._held is not None, self.keys
        return self._held[self.keys.index(key)]

    def reduced(self, gradients: Shards) -> Shards:
        """The gradients of a step, summed over replicas, each sharded as in its update. ``gradients``: the sums over microbatches, where
        they were not scattered before."""
        first = self.group.num_in_microbatches
        assert not self._made, sorted(self._made)
        shards, self._held = self._held, None
        if not first:
            shards = [gradients[key] for key in self.keys]
        assert shards is not None, self.keys
        for number in range(first, len(self.group.splits)):
            shards = self._scattered(shards, number)
        if self.group.all_reduced:
            flat = torch.cat([shard.flatten() for shard in shards])
            with self._moving():
                dist.all_reduce(flat, group=self._ranks.peers(self.group.all_reduced).group)
            parts = flat.split([shard.numel() for shard in shards])
            shards = [part.view(shard.shape) for part, shard in zip(parts, shards, strict=True)]
        return dict(zip(self.keys, shards, strict=True))

    def own_parts(self, weights: Shards) -> Shards:
        """Views of the parts of the weights that this rank updates."""
        return {one.key: self._part(weights[one.key], one, len(self._peers)) for one in self.group.weights}

    def held_parts(self, weights: Shards) -> Shards:
        """Views of the parts of the weights of which this rank sums gradients over microbatches."""
        splits = self.group.num_in_microbatches
        return {one.key: self._part(weights[one.key], one, splits) for one in self.group.weights}

    def gather(self, weights: Shards) -> None:
        """Replace all parts of the weights by what their ranks have made of them."""
        for number in reversed(range(len(self._peers))):
            self._gather([self._part(weights[one.key], one, number) for one in self.group.weights], number)

    def _part(self, array: torch.Tensor, one: WeightOfLayer, splits: int) -> torch.Tensor:
        for peers in self._peers[:splits]:
            size = array.shape[one.update_dim]
            start = min(peers.index * _rows(size, peers), size)
            array = array.narrow(one.update_dim, start, _own_rows(size, peers))
        return array

    def _scattered(self, arrays: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
        peers, weights = self._peers[number], self.group.weights
        rows = [self._by_peer(array, one, peers) for array, one in zip(arrays, weights, strict=True)]
        full = (torch.cat(rows, dim=1) if len(rows) > 1 else rows[0]).flatten()
        out = full.new_empty(full.numel() // peers.size)
        assert peers.group is not None
        with self._moving():
            reduce_scatter(out, full, peers.group)
        parts = out.split([row.shape[1] for row in rows])
        return [
            self._as_shard(part, array, one, peers)[: _own_rows(array.shape[one.update_dim], peers)].movedim(
                0, one.update_dim
            )
            for part, array, one in zip(parts, arrays, weights, strict=True)
        ]

    def _gather(self, arrays: Sequence[torch.Tensor], number: int) -> None:
        """Make ``arrays`` whole, of which this rank has its own part."""
        peers, weights = self._peers[number], self.group.weights
        own = [self._by_peer(array, one, peers)[peers.index] for array, one in zip(arrays, weights, strict=True)]
        flat = torch.cat(own)
        # One weight whose shards are its rows needs no second copy of it.
        in_place = len(arrays) == 1 and arrays[0].is_contiguous() and self._by_rows(arrays[0], weights[0], peers)
        out = arrays[0].view(-1) if in_place else flat.new_empty(peers.size * flat.numel())
        assert peers.group is not None
        with self._moving():
            all_gather(out, flat, peers.group)
        if in_place:
            return
        parts = out.view(peers.size, -1).split([one.numel() for one in own], dim=1)
        for array, one, part in zip(arrays, weights, parts, strict=True):
            rows = array.shape[one.update_dim]
            array.copy_(self._as_shard(part, array, one, peers, whole=True)[:rows].movedim(0, one.update_dim))

    @staticmethod
    def _by_rows(array: torch.Tensor, one: WeightOfLayer, peers: Peers) -> bool:
        return one.update_dim == 0 and array.shape[0] % peers.size == 0

    @staticmethod
    def _by_peer(array: torch.Tensor, one: WeightOfLayer, peers: Peers) -> torch.Tensor:
        """The array with its update dim first, padded, a row for each of the peers."""
        moved = array.detach().movedim(one.update_dim, 0)
        missing = _rows(moved.shape[0], peers) * peers.size - moved.shape[0]
        if missing:
            moved = torch.cat([moved, moved.new_zeros((missing, *moved.shape[1:]))])
        return moved.reshape(peers.size, -1)

    @staticmethod
    def _as_shard(
        part: torch.Tensor, array: torch.Tensor, one: WeightOfLayer, peers: Peers, *, whole: bool = False
    ) -> torch.Tensor:
        """What a rank has received for an array, with the update dim first and padding at its end."""
        inner = [size for dim, size in enumerate(array.shape) if dim != one.update_dim]
        rows = _rows(array.shape[one.update_dim], peers) * (peers.size if whole else 1)
        return part.reshape(rows, *inner)

    def _moving(self) -> AbstractContextManager[None]:
        return moving(component_of(self.group.weights, self._ranks.mesh), self.group.weights[0].weight)


def _rows(size: int, peers: Peers) -> int:
    """Of a dim of ``size``, the rows of each peer, with padding."""
    return -(-size // peers.size)


def _own_rows(size: int, peers: Peers) -> int:
    """Those of this rank without padding."""
    rows = _rows(size, peers)
    return min(max(size - peers.index * rows, 0), rows)
