"""A shard of a weight as PyTorch stores it, as boxes of the table's dims: what is initialized, saved and read.

PyTorch merges some dims of the table (``as_torch_stores``) and stores them in another order. A shard that begins or ends
inside a head is then not one box of ``heads`` and ``head_dim``, but up to three: the end of a head, full heads, the
beginning of a head.
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
class TableBox:
    """A box of the table's dims, and its place in a stored shard.

    ``local``: its range along each stored dim, relative to the shard's first element. ``shape``: its shape there with
    the stored dims unmerged. Transposing that to ``to_table`` gives the box; transposing the box to ``to_stored``
    gives that.
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
        """Its shape in the stored shard."""
        return tuple(stop - start for start, stop in self.local)


def table_boxes(weight: Weight, shard: Box) -> tuple[TableBox, ...]:
    """The boxes of the table's dims that make up ``shard``, a box of the stored dims of one layer.

    >>> from shardwright.core.model.table import Initializer
    >>> w = Weight(name="q", component="attention", logical_axes=("embed", "heads", "head_dim"), shape=(64, 4, 16),
    ...            initializer=Initializer(kind="normal", stddev=0.1), contracted=(), storage=("embed",),
    ...            torch_dims=(("heads", "head_dim"), ("embed",)))
    >>> for stored in table_boxes(w, Box((24, 0), (48, 64))):
    ...     print(stored.box, stored.local, stored.shape, stored.to_table)
    0:64,1:2,8:16 ((0, 8), (0, 64)) (1, 8, 64) (2, 0, 1)
    0:64,2:3,0:16 ((8, 24), (0, 64)) (1, 16, 64) (2, 0, 1)
    """
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    unmerged = tuple(name for dim in dims for name in dim)
    to_table = tuple(unmerged.index(name) for name in weight.logical_axes)
    ranges = [
        list(_unmerged_ranges(start, stop, [weight.size(name) for name in dim]))
        for dim, start, stop in zip(dims, shard.start, shard.stop, strict=True)
    ]
    return tuple(_table_box(combination, shard, to_table) for combination in product(*ranges))


def _table_box(combination: Sequence[tuple[Range, list[Range]]], shard: Box, to_table: tuple[int, ...]) -> TableBox:
    ranges = [one for _, inner in combination for one in inner]
    box = [ranges[place] for place in to_table]
    return TableBox(
        box=Box(tuple(start for start, _ in box), tuple(stop for _, stop in box)),
        local=tuple(
            (start - first, stop - first) for ((start, stop), _), first in zip(combination, shard.start, strict=True)
        ),
        shape=tuple(stop - start for start, stop in ranges),
        to_table=to_table,
    )


def _unmerged_ranges(start: int, stop: int, sizes: Sequence[int]) -> Iterator[tuple[Range, list[Range]]]:
    """A range of a merged dim, split so that each subrange is a box of the unmerged dims: each, with its range along them.

    >>> list(_unmerged_ranges(3, 9, [4, 3]))
    [((3, 9), [(1, 3), (0, 3)])]
    >>> list(_unmerged_ranges(2, 7, [4, 3]))
    [((2, 3), [(0, 1), (2, 3)]), ((3, 6), [(1, 2), (0, 3)]), ((6, 7), [(2, 3), (0, 1)])]
    """
    if len(sizes) == 1:
        yield (start, stop), [(start, stop)]
        return
    inner = prod(sizes[1:])
    while start < stop:
        major, within = divmod(start, inner)
        if within == 0 and stop - start >= inner:
            full = (stop - start) // inner
            yield (start, start + full * inner), [(major, major + full), *((0, size) for size in sizes[1:])]
            start += full * inner
            continue
        end = min(stop, (major + 1) * inner)
        for (first, last), ranges in _unmerged_ranges(within, within + end - start, sizes[1:]):
            yield (first + major * inner, last + major * inner), [(major, major + 1), *ranges]
        start = end
