"""Whether boxes cover a tensor, each index once; if not, the exact holes and overlaps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True)
class Overlap:
    """A region that several boxes hold; ``indices`` are their numbers in the list that was checked."""

    region: Box
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The faults of a list of boxes; none if ``exact``.

    ``outside``: numbers of the boxes that exceed the shape. ``more``: the search stopped at its limit, so that there
    are further holes or overlaps.
    """

    holes: tuple[Box, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    outside: tuple[int, ...] = ()
    more: bool = False

    @property
    def exact(self) -> bool:
        """Every index of the shape is in one box, and no box exceeds the shape."""
        return not (self.holes or self.overlaps or self.outside or self.more)

    def problems(self) -> tuple[str, ...]:
        """One line for each fault."""
        lines = [f"no box holds {hole}" for hole in self.holes]
        for overlap in self.overlaps:
            lines.append(f"boxes {', '.join(map(str, overlap.indices))} all hold {overlap.region}")
        lines += [f"box {index} exceeds the shape" for index in self.outside]
        return (*lines, *(["and more"] if self.more else []))


def coverage(boxes: Sequence[Box], shape: Sequence[int], limit: int = 100) -> Coverage:
    """Check that ``boxes`` cover ``shape`` once.

    Splits the tensor at the corners of the boxes until no corner is inside a region. So the time grows with the
    number of boxes and not with their sizes: a few tenths of a second for ten thousand. It begins at low indices,
    and stops after ``limit`` faulty regions.

    >>> coverage([Box((0, 0), (4, 8)), Box((4, 0), (8, 8))], (8, 8)).exact
    True
    >>> coverage([Box((0, 0), (4, 8)), Box((3, 0), (8, 4))], (8, 8)).problems()
    ('no box holds 4:8,4:8', 'boxes 0, 1 all hold 3:4,0:4')
    >>> coverage([Box((0,), (9,))], (8,)).problems()
    ('box 0 exceeds the shape',)
    """
    whole = Box.whole(shape)
    outside = tuple(index for index, box in enumerate(boxes) if box.size and not whole.contains(box))
    clipped = ((index, whole.intersect(box)) for index, box in enumerate(boxes))
    pending = [(whole, [(index, box) for index, box in clipped if box is not None])] if whole.size else []
    holes: list[Box] = []
    overlaps: list[Overlap] = []
    while pending and len(holes) + len(overlaps) < limit:
        region, inside = pending.pop()
        split = _best_split(region, [box for _, box in inside])
        if split is not None:
            pending += _split_at(region, inside, *split)
        elif not inside:
            holes.append(region)
        elif len(inside) > 1:
            overlaps.append(Overlap(region, tuple(sorted(index for index, _ in inside))))
    joined: dict[tuple[int, ...], list[Box]] = {}
    for overlap in overlaps:
        joined.setdefault(overlap.indices, []).append(overlap.region)
    return Coverage(
        holes=join(holes),
        overlaps=tuple(Overlap(region, indices) for indices, found in joined.items() for region in join(found)),
        outside=outside,
        more=bool(pending),
    )


def join(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """The same indices in fewer boxes: neighbours that differ in only one dim are joined. No two boxes may overlap.

    >>> [str(box) for box in join([Box((0, 0), (2, 4)), Box((2, 0), (4, 4)), Box((4, 0), (6, 2))])]
    ['0:4,0:4', '4:6,0:2']
    """
    found, before = sorted(boxes), -1
    while len(found) != before:
        before = len(found)
        for dim in range(len(found[0].start) if found else 0):
            found = _joined_along(found, dim)
    return tuple(sorted(found))


def _joined_along(boxes: Sequence[Box], dim: int) -> list[Box]:
    def rest(box: Box) -> tuple[tuple[int, ...], ...]:
        return box.start[:dim] + box.start[dim + 1 :], box.stop[:dim] + box.stop[dim + 1 :]

    result: list[Box] = []
    for box in sorted(boxes, key=lambda box: (rest(box), box.start[dim])):
        last = result[-1] if result else None
        if last is not None and rest(last) == rest(box) and last.stop[dim] == box.start[dim]:
            result[-1] = Box(last.start, box.stop)
        else:
            result.append(box)
    return result


def _best_split(region: Box, boxes: Sequence[Box]) -> tuple[int, int] | None:
    """The dim and index at which to split ``region``; None if every box fills it."""
    best: tuple[int, int, int, int] | None = None
    for dim, (low, high) in enumerate(zip(region.start, region.stop, strict=True)):
        inside = sorted(at for box in boxes for at in (box.start[dim], box.stop[dim]) if low < at < high)
        if inside:
            # The middle corner halves the work; the dim in which it splits the fewest boxes repeats the least work.
            at = inside[len(inside) // 2]
            num_split = sum(box.start[dim] < at < box.stop[dim] for box in boxes)
            best = min(best or (num_split, -len(inside), dim, at), (num_split, -len(inside), dim, at))
    return None if best is None else best[2:]


NumberedBoxes = list[tuple[int, Box]]


def _split_at(
    region: Box, boxes: NumberedBoxes, dim: int, at: int
) -> tuple[tuple[Box, NumberedBoxes], tuple[Box, NumberedBoxes]]:
    """``region`` and the boxes in it, above and below ``at`` along ``dim``: the last is checked first."""
    below: NumberedBoxes = []
    above: NumberedBoxes = []
    for index, box in boxes:
        if box.stop[dim] <= at:
            below.append((index, box))
        elif box.start[dim] >= at:
            above.append((index, box))
        else:
            below.append((index, _with_stop(box, dim, at)))
            above.append((index, _with_start(box, dim, at)))
    return (_with_start(region, dim, at), above), (_with_stop(region, dim, at), below)


def _with_start(box: Box, dim: int, at: int) -> Box:
    return Box((*box.start[:dim], at, *box.start[dim + 1 :]), box.stop)


def _with_stop(box: Box, dim: int, at: int) -> Box:
    return Box(box.start, (*box.stop[:dim], at, *box.stop[dim + 1 :]))
