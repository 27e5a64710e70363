"""The boxes that a rank really holds of a sharded tensor, which its placements alone do not say.

The same placements have two readings on a dim that its axes do not divide:

| reading | who shards so |
|---|---|
| ``nested`` | ``fully_shard`` after tensor parallelism: one split after another, major first (``boxes.py``) |
| ``placed`` | ``distribute_tensor``: placement after placement, in mesh order (``placements.py``) |

They differ in the sizes of some ranks' shards wherever they differ in rows: so the shapes that the ranks hold say which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Literal

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import shard_range
from shardwright.core.boxes.placements import (
    Placement,
    Replicate,
    RowRange,
    StridedShard,
    placement_rows,
)

Reading = Literal["nested", "placed"]
Ranges = tuple[tuple[RowRange, ...], ...]
"""The ranges of rows of each dim, ascending."""


@dataclass(frozen=True, slots=True)
class LocalBox:
    """A box of a tensor, and its place ``local`` in the shard that the rank holds."""

    box: Box
    local: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the shape that a rank holds says of its placements: the ranges of each reading that gives this shape.

    ``reading``: the only one that fits; None if both do.
    """

    nested: Ranges | None
    placed: Ranges | None

    @property
    def reading(self) -> Reading | None:
        if self.nested is None or self.placed is None:
            return "placed" if self.nested is None else "nested"
        return None

    @property
    def ambiguous(self) -> bool:
        """Both readings fit, with other rows."""
        return self.nested is not None and self.placed is not None and self.nested != self.placed

    def boxes(self, reading: Reading | None = None) -> tuple[LocalBox, ...]:
        """The boxes under a reading; by default under the only one that fits, or ``nested``."""
        ranges = self.placed if (reading or self.reading) == "placed" else self.nested
        assert ranges is not None, (self, reading)
        return boxes_of(ranges)


def fit(
    shape: Sequence[int],
    placements: Sequence[Placement],
    sizes: Sequence[int],
    here: Sequence[int],
    local_shape: Sequence[int],
) -> Fit | None:
    """The readings of placements that give the shape a rank holds; None if neither does.

    ``sizes``: of the mesh axes, ``here``: the rank's index along each, both in the order of ``placements``.

    >>> from shardwright.core.boxes.placements import Shard
    >>> dp_tp = (StridedShard(0, 2), Shard(0))  # dim 7 over tensor 2, then each shard over fsdp 3
    >>> fit((7,), dp_tp, (3, 2), (2, 1), (1,)).reading, fit((7,), dp_tp, (3, 2), (2, 1), (0,)).reading
    ('nested', 'placed')
    >>> fit((7,), dp_tp, (3, 2), (2, 1), (3,)) is None
    True
    """
    applied = list(zip(placements, sizes, here, strict=True))
    by_dim = [
        [one for one in applied if not isinstance(one[0], Replicate) and one[0].dim == dim] for dim in range(len(shape))
    ]
    nested = [_nested_rows(size, on_dim) for size, on_dim in zip(shape, by_dim, strict=True)]
    placed = tuple(placement_rows(size, on_dim) for size, on_dim in zip(shape, by_dim, strict=True))
    known = None if any(rows is None for rows in nested) else tuple(rows for rows in nested if rows is not None)
    found = Fit(
        nested=known if known is not None and _gives(known, local_shape) else None,
        placed=placed if _gives(placed, local_shape) else None,
    )
    return None if found.nested is None and found.placed is None else found


def agreed(votes: Iterable[Mapping[str, Reading]]) -> tuple[Mapping[str, Reading], frozenset[str]]:
    """The reading of each tensor from those of all ranks, and the tensors on which ranks contradict each other."""
    found: dict[str, Reading] = {}
    contradicted: set[str] = set()
    for one in votes:
        for name, reading in one.items():
            if found.setdefault(name, reading) != reading:
                contradicted.add(name)
    return found, frozenset(contradicted)


def boxes_of(ranges: Ranges) -> tuple[LocalBox, ...]:
    """The boxes of all combinations of ranges, and where each is in the shard; none if a dim has no rows.

    >>> for one in boxes_of((((0, 2), (6, 7)), ((0, 4),))):
    ...     print(one.box, one.local)
    0:2,0:4 0:2,0:4
    6:7,0:4 2:3,0:4
    """
    along = [list(zip(rows, _places(rows), strict=True)) for rows in ranges]
    return tuple(
        LocalBox(
            Box(tuple(rows[0] for rows, _ in combination), tuple(rows[1] for rows, _ in combination)),
            Box(tuple(place[0] for _, place in combination), tuple(place[1] for _, place in combination)),
        )
        for combination in product(*along)
    )


def major_first(applied: Sequence[tuple[int, int]]) -> tuple[int, ...] | None:
    """The order of the axes on one dim, major first, from (size, split factor) of each in mesh order; None if there is none.

    The inverse of ``placements_of``: a split factor is the product of the sizes of the axes that are more major and later
    in the mesh.

    >>> major_first([(4, 8), (8, 1)]), major_first([(2, 1), (3, 1)]), major_first([(4, 2)])
    ((1, 0), (0, 1), None)
    """
    order: list[int] = []
    for axis in reversed(range(len(applied))):
        place, before = 0, 1
        while before < applied[axis][1] and place < len(order):
            before *= applied[order[place]][0]
            place += 1
        if before != applied[axis][1]:
            return None
        order.insert(place, axis)
    return tuple(order)


def _nested_rows(size: int, applied: Sequence[tuple[Placement, int, int]]) -> tuple[RowRange, ...] | None:
    factors = [one.split_factor if isinstance(one, StridedShard) else 1 for one, _, _ in applied]
    order = major_first([(number, factor) for (_, number, _), factor in zip(applied, factors, strict=True)])
    if order is None:
        return None
    start, stop = shard_range(size, [applied[axis][1:] for axis in order])
    return ((start, stop),) if start < stop else ()


def _gives(ranges: Ranges, local_shape: Sequence[int]) -> bool:
    held = tuple(sum(stop - start for start, stop in rows) for rows in ranges)
    # A shard without elements has no shape to compare: PyTorch gives some of them fewer dims.
    return held == tuple(local_shape) or (0 in held and 0 in local_shape)


def _places(rows: Sequence[RowRange]) -> list[RowRange]:
    stops = list(accumulate(stop - start for start, stop in rows))
    return [(end - (stop - start), end) for end, (start, stop) in zip(stops, rows, strict=True)]
