"""A box: the rectangular region of a tensor between two corners, in which weights are initialized, saved and moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """Indices ``start[d] <= i < stop[d]`` of each dim. The only box of a scalar has no dims and size 1.

    >>> box = Box((0, 4), (2, 8))
    >>> str(box), box.shape, box.size
    ('0:2,4:8', (2, 4), 8)
    >>> box.intersect(Box((1, 0), (3, 6)))
    Box(start=(1, 4), stop=(2, 6))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.start) == len(self.stop), (self.start, self.stop)
        assert all(0 <= a <= b for a, b in zip(self.start, self.stop, strict=True)), (self.start, self.stop)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        """The box of all indices of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The indices in both, or None if there are none."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.stop, other.stop, strict=True))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> Box:
        """The same indices relative to the start of ``outer``, which contains them all."""
        return Box(
            tuple(a - o for a, o in zip(self.start, outer.start, strict=True)),
            tuple(b - o for b, o in zip(self.stop, outer.start, strict=True)),
        )

    def contains(self, other: Box) -> bool:
        return all(a <= c and d <= b for a, b, c, d in zip(self.start, self.stop, other.start, other.stop, strict=True))

    def __str__(self) -> str:
        return ",".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True))
