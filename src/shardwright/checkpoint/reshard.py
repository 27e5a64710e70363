"""Which stored boxes feed which boxes of another layout: a plan in indices and bytes, with no array in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.checkpoint.format.manifest import StoredBox
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import intersections


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """The indices ``part`` of a tensor go from the stored box ``source`` to the box ``target``."""

    source: StoredBox
    target: Box
    part: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardPlan:
    """How one tensor gets from the boxes it is stored in to the boxes that are wanted.

    ``bytes_read``: the stored boxes that are touched, each once. ``bytes_moved``: what arrives in targets.
    """

    copies: tuple[Copy, ...]
    bytes_read: int
    bytes_moved: int


def copies_into(stored: Sequence[StoredBox], target: Box) -> tuple[Copy, ...]:
    """The copies that make up one box, in the order in which the stored boxes are given."""
    found = intersections(target, (box.box for box in stored))
    return tuple(Copy(source=stored[piece.index], target=target, part=piece.region) for piece in found)


def reshard_plan(stored: Sequence[StoredBox], targets: Sequence[Box]) -> ReshardPlan:
    """The copies that make up every target, and what they cost.

    ``stored`` covers the tensor once; targets may overlap (replicas) and need not cover it.
    """
    copies = tuple(copy for target in targets for copy in copies_into(stored, target))
    touched = {(copy.source.file, copy.source.offset): copy.source for copy in copies}
    return ReshardPlan(
        copies=copies,
        bytes_read=sum(source.num_bytes for source in touched.values()),
        bytes_moved=sum(copy.part.size * copy.source.num_bytes // copy.source.box.size for copy in copies),
    )
