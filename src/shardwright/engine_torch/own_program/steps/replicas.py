"""Replicas of a user's own weights, compared once: when they have come out of the first update, and before any other is made of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh

Axes = tuple[str, ...]
_BLOCK = 2**20
"""Elements at a time: their products take eight bytes each."""
_ODD, _NEXT = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicaComparison:
    """A comparison of digests, at the end of backward passes until the weights have changed. ``sharded_by``: the axes that shard each weight
    at rest. All ranks make it at the same pass, and all see the digests of all: what follows is the same on each."""

    def __init__(self, mesh: Mesh, sharded_by: Mapping[str, Axes], device: torch.device) -> None:
        self._mesh, self._sharded_by, self._device = mesh, dict(sharded_by), device
        self._passes = 0
        self._first: torch.Tensor | None = None

    def again(self) -> ReplicaComparison:
        return ReplicaComparison(self._mesh, self._sharded_by, self._device)

    def is_over(self, shards: Mapping[str, torch.Tensor]) -> bool:
        """Whether an update has been compared. ``shards``: what this rank has of each weight at rest.

        Raises InputError on every rank, by the name of a weight whose replicas differ.
        """
        self._passes += 1
        # Gradients of many passes may make one update, and the first rate of learning may be zero.
        if self._passes > 4 and self._passes & (self._passes - 1):
            return False
        none = torch.zeros((), dtype=torch.int64, device=self._device)
        own = torch.stack([digest_of(shards[name]) if name in shards else none for name in self._sharded_by])
        of_ranks = [torch.empty_like(own) for _ in range(self._mesh.num_devices)]
        dist.all_gather(of_ranks, own)
        digests = torch.stack(of_ranks).cpu()
        self._require_equal(digests)
        if self._first is None:
            self._first = digests
        return not torch.equal(self._first, digests)

    def _require_equal(self, digests: torch.Tensor) -> None:
        columns: dict[Axes, list[int]] = {}
        for column, axes in enumerate(self._sharded_by.values()):
            columns.setdefault(axes, []).append(column)
        names = list(self._sharded_by)
        differing: dict[int, tuple[int, int]] = {}
        for axes, of_axes in columns.items():
            groups: dict[tuple[int, ...], list[int]] = {}
            for rank in range(self._mesh.num_devices):
                here = self._mesh.coordinates(rank)
                groups.setdefault(tuple(here[axis] for axis in axes), []).append(rank)
            for ranks in groups.values():
                unlike = digests[ranks][:, of_axes] != digests[ranks[0], of_axes]
                for row, column in unlike.nonzero().tolist():
                    differing.setdefault(of_axes[column], (ranks[0], ranks[row]))
        if differing:
            first = min(differing)
            one, other = differing[first]
            more = f" {len(differing) - 1} more differ too." if len(differing) > 1 else ""
            raise InputError(
                f"weight '{names[first]}' must be the same on ranks {one} and {other}, and is not, after "
                f"{self._passes - 1} backward passes.{more} The ranks have made other initial values, loaded other ones, or updated it by other "
                f"gradients. Make values equal, with the same seed or a broadcast, before the first step, and give every rank's optimizer the "
                f"same weights and options."
            )


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """A digest of 64 bits of a tensor's elements in their order: a sum of their bits, each times its own odd number, modulo 2**64."""
    flat = tensor.detach().contiguous().reshape(-1)
    bits = (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(_INTEGERS[flat.real.itemsize])
    digest = torch.full((), len(bits), dtype=torch.int64, device=bits.device)
    factors = (
        torch.arange(min(_BLOCK, len(bits)), dtype=torch.int64, device=bits.device).mul_(2 * _ODD % 2**63).add_(_NEXT)
    )
    for block in bits.split(_BLOCK):
        digest = digest * _NEXT + (block.to(torch.int64).add_(1) * factors[: len(block)]).sum()
    return digest
