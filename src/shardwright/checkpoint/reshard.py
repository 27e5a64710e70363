"""Reshards a stored tensor: which stored boxes are copied to which boxes of another layout. Indices and bytes, no arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.checkpoint.format.manifest import StoredBox
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import intersections


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """Copies the region ``region`` of a tensor, as global indices, from the stored box ``source`` to the box ``target``."""

    source: StoredBox
    target: Box
    region: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """The copies that reshard one tensor from its stored boxes to the target boxes.

    ``bytes_read``: size of the stored boxes that are read, each counted once. ``bytes_moved``: bytes written to targets.
    """

    copies: tuple[Copy, ...]
    bytes_read: int
    bytes_moved: int


def copies_into(stored: Sequence[StoredBox], target: Box) -> tuple[Copy, ...]:
    """The copies that fill one box, in the order of ``stored``."""
    overlaps = intersections(target, (box.box for box in stored))
    return tuple(Copy(source=stored[overlap.index], target=target, region=overlap.region) for overlap in overlaps)


def reshard_plan(stored: Sequence[StoredBox], targets: Sequence[Box]) -> ReshardPlan:
    """The copies that fill every target, and their cost in bytes.

    ``stored`` covers the tensor exactly once. Targets may overlap (replicas) and need not cover the tensor.
    """
    copies = tuple(copy for target in targets for copy in copies_into(stored, target))
    sources = {(copy.source.file, copy.source.offset): copy.source for copy in copies}
    return ReshardPlan(
        copies=copies,
        bytes_read=sum(source.num_bytes for source in sources.values()),
        bytes_moved=sum(copy.region.size * copy.source.num_bytes // copy.source.box.size for copy in copies),
    )
