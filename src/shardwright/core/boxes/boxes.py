"""Who owns which box: what a spec gives each device, which devices hold the same box, and what changes owner.

Everything here is integer arithmetic over boxes. It allocates nothing of the tensor's size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from shardwright.core.boxes.box import Box
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec

Uneven = Literal["padded", "nested"]
"""What happens where the axes on a dim do not divide it.

``padded``: JAX's rule. One cut into as many pieces as the axes have positions together, all of the size of the
first; the last ones are short or empty. ``nested``: PyTorch's rule. ``torch.chunk`` by the most major axis, then
each part by the next. Where the product of the axes divides the dim they are the same.
"""

Owned = tuple[tuple[Box, ...], ...]
"""The boxes of each device, by device number. A device that owns nothing has none."""


@dataclass(frozen=True, slots=True)
class HeldBox:
    """One box and every device that holds it, ascending."""

    box: Box
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a target box that stored box number ``index`` has, in indices of the whole tensor."""

    index: int
    region: Box


@dataclass(frozen=True, slots=True)
class Received:
    """A region that a device needs and does not have, and the devices that could send it, ascending."""

    region: Box
    holders: tuple[int, ...]


def shard_range(size: int, cuts: Iterable[tuple[int, int]], uneven: Uneven = "padded") -> tuple[int, int]:
    """The indices ``start <= i < stop`` of one dim of ``size`` that remain after ``cuts``.

    Each cut is (number of parts, which of them), major first. ``start == stop`` where nothing remains.

    >>> [shard_range(9, [(2, i), (2, j)], "padded") for i in (0, 1) for j in (0, 1)]
    [(0, 3), (3, 6), (6, 9), (9, 9)]
    >>> [shard_range(9, [(2, i), (2, j)], "nested") for i in (0, 1) for j in (0, 1)]
    [(0, 3), (3, 5), (5, 7), (7, 9)]
    """
    if uneven == "padded":
        parts, which = 1, 0
        for number, index in cuts:
            parts, which = parts * number, which * number + index
        cuts = [(parts, which)]
    start, stop = 0, size
    for number, index in cuts:
        part = -(-(stop - start) // number)
        start = min(start + index * part, stop)
        stop = min(start + part, stop)
    return start, stop


def shard_box(spec: Spec, mesh: Mesh, shape: Sequence[int], device: int, uneven: Uneven = "padded") -> Box | None:
    """The box that ``device`` owns of a tensor of ``shape``; None where it owns nothing.

    A spec gives every device one box, whatever the order of the axes on a dim. The box never leaves ``shape``:
    what an engine pads belongs to nobody.

    >>> mesh, shape = Mesh.of(fsdp=2, tensor=2), (8, 6)
    >>> [str(shard_box(Spec.of(heads=["tensor", "fsdp"], embed=[]), mesh, shape, device)) for device in range(4)]
    ['0:2,0:6', '4:6,0:6', '2:4,0:6', '6:8,0:6']
    """
    assert len(spec.dims) == len(shape), (str(spec), tuple(shape))
    sizes, here = mesh.shape, mesh.coordinates(device)
    ranges = [
        shard_range(size, [(sizes[axis], here[axis]) for axis in dim.axes], uneven)
        for dim, size in zip(spec.dims, shape, strict=True)
    ]
    if any(start == stop for start, stop in ranges):
        return None
    return Box(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))


def owned_boxes(spec: Spec, mesh: Mesh, shape: Sequence[int], uneven: Uneven = "padded") -> Owned:
    """The boxes of every device: one, or none where the dim is too small to give it any.

    >>> [" ".join(map(str, boxes)) for boxes in owned_boxes(Spec.of(embed=["fsdp"]), Mesh.of(fsdp=4), (5,))]
    ['0:2', '2:4', '4:5', '']
    """
    # Devices that differ along no axis of the spec share a box: it is worked out once.
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    owned: list[tuple[Box, ...]] = []
    for device in range(mesh.num_devices):
        here = mesh.coordinates(device)
        key = tuple(here[axis] for axis in spec.axes)
        if key not in known:
            box = shard_box(spec, mesh, shape, device, uneven)
            known[key] = () if box is None else (box,)
        owned.append(known[key])
    return tuple(owned)


def held_boxes(owned: Owned) -> tuple[HeldBox, ...]:
    """The distinct boxes, in the order of their corners, each with the devices that hold it.

    >>> mesh = Mesh.of(data=2, fsdp=2)
    >>> for held in held_boxes(owned_boxes(Spec.of(embed=["fsdp"]), mesh, (6,))):
    ...     print(held.box, held.devices)
    0:3 (0, 2)
    3:6 (1, 3)
    """
    holders: dict[Box, list[int]] = {}
    for device, boxes in enumerate(owned):
        for box in boxes:
            holders.setdefault(box, []).append(device)
    return tuple(HeldBox(box, tuple(devices)) for box, devices in sorted(holders.items()))


def saves(spec: Spec, mesh: Mesh, device: int) -> bool:
    """Whether a device saves what it holds of a tensor: of replicas, the first one does.

    >>> [saves(Spec.of(embed=["fsdp"]), Mesh.of(data=2, fsdp=2), device) for device in range(4)]
    [True, True, False, False]
    """
    here = mesh.coordinates(device)
    return not any(here[axis] for axis in mesh.names if axis not in spec.axes)


def pieces(target: Box, stored: Iterable[Box]) -> tuple[Piece, ...]:
    """Which stored boxes hold a part of ``target``, and which part: what a load reads, and no more.

    >>> [(piece.index, str(piece.region)) for piece in pieces(Box((3,), (9,)), [Box((4 * n,), (4 * n + 4,)) for n in range(4)])]
    [(0, '3:4'), (1, '4:8'), (2, '8:9')]
    """
    found = ((index, target.intersect(box)) for index, box in enumerate(stored))
    return tuple(Piece(index, region) for index, region in found if region is not None)


def received(source: Owned, target: Owned) -> tuple[tuple[Received, ...], ...]:
    """For each device, the regions it needs for ``target`` and does not have in ``source``.

    The distinct boxes of ``source`` must not overlap, as those of a spec never do. Takes time in the number of
    devices times the number of distinct boxes.

    >>> mesh = Mesh.of(fsdp=2, expert=2)
    >>> before, after = (owned_boxes(Spec.of(batch=axes), mesh, (8,)) for axes in (["fsdp", "expert"], ["fsdp"]))
    >>> [" ".join(f"{r.region} from {r.holders}" for r in regions) for regions in received(before, after)]
    ['2:4 from (1,)', '0:2 from (0,)', '6:8 from (3,)', '4:6 from (2,)']
    """
    assert len(source) == len(target), (len(source), len(target))
    held = held_boxes(source)
    return tuple(
        tuple(
            Received(piece.region, held[piece.index].devices)
            for box in needed
            for piece in pieces(box, (one.box for one in held))
            if device not in held[piece.index].devices
        )
        for device, needed in enumerate(target)
    )


def fed_from_outside(source: Owned, target: Owned, mesh: Mesh, axes: Iterable[str]) -> tuple[int, ...]:
    """The devices that, going from ``source`` to ``target``, need data that nobody in their group over ``axes`` has.

    This is what decides the order of the axes on a dim. With the axes that stay before the axes that leave, a
    gather over the leaving axes feeds no device from outside; the other way round it feeds them all:

    >>> mesh = Mesh.of(fsdp=2, expert=4)
    >>> after = owned_boxes(Spec.of(batch=["fsdp"]), mesh, (16,))
    >>> fed_from_outside(owned_boxes(Spec.of(batch=["fsdp", "expert"]), mesh, (16,)), after, mesh, ["expert"])
    ()
    >>> fed_from_outside(owned_boxes(Spec.of(batch=["expert", "fsdp"]), mesh, (16,)), after, mesh, ["expert"])
    (0, 1, 2, 3, 4, 5, 6, 7)

    The law holds for ``nested`` boxes of any size. ``padded`` boxes keep it only where the axes divide the dim:
    9 rows cut by 2 x 4 have a box 4:6, which lies across the border between 0:5 and 5:9.
    """
    axes = tuple(axes)
    outside: list[int] = []
    for device, regions in enumerate(received(source, target)):
        group = set(mesh.group(device, axes))
        if any(group.isdisjoint(region.holders) for region in regions):
            outside.append(device)
    return tuple(outside)
