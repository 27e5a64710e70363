"""Which device owns which box under a spec, and which of several replicas saves it.

All of it is integer arithmetic over boxes. Nothing of the tensor's size is allocated.

One rule says how the axes of a dim shard it, also where they do not divide it: one split after another, major first. A split
rounds up: all its shards have the size of the first one, except the last shards, which are short or empty.

| who shards | splits of a dim |
|---|---|
| JAX | one, over the product of its axes |
| DTensor | one for each axis |
| ``fully_shard`` | one for each axis in use, as DTensor; then one over the product of the gathered axes |

``in_turn`` names the axes that have a split of their own. Where the axes divide the dim, all three give the same shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from shardwright.core.boxes.box import Box
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec

Owned = tuple[tuple[Box, ...], ...]
"""The boxes of each device, by device number. A device that owns no element has no box."""


def shard_range(size: int, splits: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The indices ``start <= i < stop`` of one shard of a dim of ``size``.

    Each split is (number of shards, index of the shard), major first. ``start == stop`` if the shard is empty.

    >>> [shard_range(9, [(4, i)]) for i in range(4)]
    [(0, 3), (3, 6), (6, 9), (9, 9)]
    >>> [shard_range(9, [(2, i), (2, j)]) for i in (0, 1) for j in (0, 1)]
    [(0, 3), (3, 5), (5, 7), (7, 9)]
    """
    start, stop = 0, size
    for number, index in splits:
        length = -(-(stop - start) // number)
        start = min(start + index * length, stop)
        stop = min(start + length, stop)
    return start, stop


def shard_box(spec: Spec, mesh: Mesh, shape: Sequence[int], device: int, in_turn: Collection[str] = ()) -> Box | None:
    """The box that ``device`` owns of a tensor of ``shape``; None if its shard is empty.

    Under a spec every device has one box, for any order of the axes on a dim. The box never exceeds ``shape``:
    padding belongs to no device. ``in_turn``: the axes that have a split of their own; all other axes of a dim are one.

    >>> mesh, shape = Mesh.of(fsdp=2, tensor=2), (8, 6)
    >>> [str(shard_box(Spec.of(heads=["tensor", "fsdp"], embed=[]), mesh, shape, device)) for device in range(4)]
    ['0:2,0:6', '4:6,0:6', '2:4,0:6', '6:8,0:6']
    """
    assert len(spec.dims) == len(shape), (str(spec), tuple(shape))
    sizes, here = mesh.shape, mesh.coordinates(device)
    ranges = [
        shard_range(size, _splits([(axis, sizes[axis], here[axis]) for axis in dim.axes], in_turn))
        for dim, size in zip(spec.dims, shape, strict=True)
    ]
    if any(start == stop for start, stop in ranges):
        return None
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))


def _splits(axes: Iterable[tuple[str, int, int]], in_turn: Collection[str]) -> list[tuple[int, int]]:
    """The splits of one dim: of axes with their sizes and indices, major first, those not ``in_turn`` joined.

    >>> _splits([("tensor", 4, 3), ("fsdp", 2, 1), ("context", 3, 2)], in_turn=["tensor"])
    [(4, 3), (6, 5)]
    """
    splits: list[tuple[int, int]] = []
    joins = False
    for axis, number, index in axes:
        if joins and axis not in in_turn:
            total, which = splits.pop()
            number, index = total * number, which * number + index
        splits.append((number, index))
        joins = axis not in in_turn
    return splits


def owned_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int], in_turn: Collection[str] = ()) -> Owned:
    """The boxes of every device: one, or none if a dim is too small for the device to have a shard.

    >>> [" ".join(map(str, boxes)) for boxes in owned_boxes(Spec.of(embed=["fsdp"]), Mesh.of(fsdp=4), (5,))]
    ['0:2', '2:4', '4:5', '']
    """
    assert len(spec.dims) == len(shape), (str(spec), tuple(shape))
    ranges = [_ranges(dim.axes, mesh, size, in_turn) for dim, size in zip(spec.dims, shape, strict=True)]
    # Devices with the same range of each dim share a box: it is made once.
    known: dict[tuple[tuple[int, int], ...], tuple[Box, ...]] = {}
    owned: list[tuple[Box, ...]] = []
    for here in zip(*ranges, strict=True) if ranges else [()] * mesh.num_devices:
        found = known.get(here)
        if found is None:
            empty = any(start == stop for start, stop in here)
            box = Box(tuple(start for start, _ in here), tuple(stop for _, stop in here))
            found = known[here] = () if empty else (box,)
        owned.append(found)
    return tuple(owned)


def _ranges(axes: Sequence[str], mesh: Mesh, size: int, in_turn: Collection[str]) -> Sequence[tuple[int, int]]:
    """The indices that each device has of a dim of ``size``, which some axes shard."""
    if not axes:
        return [(0, size)] * mesh.num_devices
    sizes = mesh.shape
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    ranges: list[tuple[int, int]] = []
    for here in zip(*(mesh.indices(axis) for axis in axes), strict=True):
        found = known.get(here)
        if found is None:
            split = [(axis, sizes[axis], index) for axis, index in zip(axes, here, strict=True)]
            found = known[here] = shard_range(size, _splits(split, in_turn))
        ranges.append(found)
    return ranges


def saves(spec: Spec, mesh: Mesh, device: int) -> bool:
    """Whether a device saves its local shard of a tensor: of its replicas, the first one does.

    >>> [saves(Spec.of(embed=["fsdp"]), Mesh.of(data=2, fsdp=2), device) for device in range(4)]
    [True, True, False, False]
    """
    here = mesh.coordinates(device)
    return not any(here[axis] for axis in mesh.names if axis not in spec.axes)
