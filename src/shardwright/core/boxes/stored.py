"""A part of a weight as PyTorch stores it, in the boxes of the table's dims: what is made, saved and read of it.

PyTorch stores some dims of the table as one (``as_torch_stores``), and in another order. A part that begins or ends inside
a head is then no box of ``heads`` and ``head_dim``, but up to three: the end of one head, whole heads, the beginning of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwright.core.boxes.box import Box
from shardwright.core.model.table import Weight

Range = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A box of the table's dims, and where it lies in a stored part.

    ``local``: its range along each stored dim, counted from the part's first element. There it has ``shape``, the stored
    dims taken apart; with its dims in the order ``to_table`` it is the box, and in the order ``to_stored`` the box is it.
    """

    box: Box
    local: tuple[Range, ...]
    shape: tuple[int, ...]
    to_table: tuple[int, ...]

    @property
    def to_stored(self) -> tuple[int, ...]:
        return tuple(self.to_table.index(place) for place in range(len(self.to_table)))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Its shape in the stored part."""
        return tuple(stop - start for start, stop in self.local)


def stored_pieces(weight: Weight, part: Box) -> tuple[StoredPiece, ...]:
    """The boxes of the table's dims that make up ``part``, which is a box of the stored ones; one layer's.

    >>> from shardwright.core.model.table import Initializer
    >>> w = Weight(name="q", component="attention", logical_axes=("embed", "heads", "head_dim"), shape=(64, 4, 16),
    ...            initializer=Initializer(kind="normal", stddev=0.1), contracted=(), storage=("embed",),
    ...            torch_dims=(("heads", "head_dim"), ("embed",)))
    >>> for piece in stored_pieces(w, Box((24, 0), (48, 64))):
    ...     print(piece.box, piece.local, piece.shape, piece.to_table)
    0:64,1:2,8:16 ((0, 8), (0, 64)) (1, 8, 64) (2, 0, 1)
    0:64,2:3,0:16 ((8, 24), (0, 64)) (1, 16, 64) (2, 0, 1)
    """
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    split = tuple(name for dim in dims for name in dim)
    to_table = tuple(split.index(name) for name in weight.logical_axes)
    runs = [
        list(_runs(start, stop, [weight.size(name) for name in dim]))
        for dim, start, stop in zip(dims, part.start, part.stop, strict=True)
    ]
    return tuple(_piece(combination, part, to_table) for combination in product(*runs))


def _piece(combination: Sequence[tuple[Range, list[Range]]], part: Box, to_table: tuple[int, ...]) -> StoredPiece:
    ranges = [one for _, inner in combination for one in inner]
    box = [ranges[place] for place in to_table]
    return StoredPiece(
        box=Box(tuple(start for start, _ in box), tuple(stop for _, stop in box)),
        local=tuple(
            (start - first, stop - first) for ((start, stop), _), first in zip(combination, part.start, strict=True)
        ),
        shape=tuple(stop - start for start, stop in ranges),
        to_table=to_table,
    )


def _runs(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Range, list[Range]]]:
    """The range of a dim that several make up, cut where it is a box of them: each run, and its range along each.

    >>> list(_runs(3, 9, [4, 3]))
    [((3, 9), [(1, 3), (0, 3)])]
    >>> list(_runs(2, 7, [4, 3]))
    [((2, 3), [(0, 1), (2, 3)]), ((3, 6), [(1, 2), (0, 3)]), ((6, 7), [(2, 3), (0, 1)])]
    """
    if len(sizes) == 1:
        yield (start, stop), [(start, stop)]
        return
    inner = prod(sizes[1:])
    while start < stop:
        major, within = divmod(start, inner)
        if within == 0 and stop - start >= inner:
            whole = (stop - start) // inner
            yield (start, start + whole * inner), [(major, major + whole), *((0, size) for size in sizes[1:])]
            start += whole * inner
            continue
        end = min(stop, (major + 1) * inner)
        for (first, last), ranges in _runs(within, within + end - start, sizes[1:]):
            yield (first + major * inner, last + major * inner), [(major, major + 1), *ranges]
        start = end
