"""What devices receive in a resharding, box by box: the reason for the order of axes on a dim."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import Owned
from shardwright.core.mesh.mesh import Mesh


@dataclass(frozen=True, slots=True)
class HeldBox:
    """One box and every device that holds it, ascending."""

    box: Box
    devices: tuple[int, ...]


def held_boxes(owned: Owned) -> tuple[HeldBox, ...]:
    """The distinct boxes, in the order of their corners, each with the devices that hold it."""
    holders: dict[Box, list[int]] = {}
    for device, boxes in enumerate(owned):
        for box in boxes:
            holders.setdefault(box, []).append(device)
    return tuple(HeldBox(box, tuple(devices)) for box, devices in sorted(holders.items()))


@dataclass(frozen=True, slots=True)
class Intersection:
    """The region of a target box that stored box number ``index`` contains, in indices of the unsharded tensor."""

    index: int
    region: Box


def intersections(target: Box, stored: Iterable[Box]) -> tuple[Intersection, ...]:
    """The stored boxes that intersect ``target``, and the intersections."""
    found = ((index, target.intersect(box)) for index, box in enumerate(stored))
    return tuple(Intersection(index, region) for index, region in found if region is not None)


@dataclass(frozen=True, slots=True)
class Received:
    """A region that a device needs and does not hold, and the devices that hold it, ascending."""

    region: Box
    holders: tuple[int, ...]


def received(source: Owned, target: Owned) -> tuple[tuple[Received, ...], ...]:
    """For each device, the regions that it needs for ``target`` and does not hold in ``source``.

    The distinct boxes of ``source`` must not overlap; those of a spec never do. The time grows with the number of
    devices times the number of distinct boxes.
    """
    assert len(source) == len(target), (len(source), len(target))
    held = held_boxes(source)
    return tuple(
        tuple(
            Received(found.region, held[found.index].devices)
            for box in needed
            for found in intersections(box, (one.box for one in held))
            if device not in held[found.index].devices
        )
        for device, needed in enumerate(target)
    )


def receiving_from_outside(source: Owned, target: Owned, mesh: Mesh, axes: Iterable[str]) -> tuple[int, ...]:
    """The devices that need data from outside their group over ``axes`` in a resharding from ``source`` to ``target``.

    This decides the order of the axes on a dim. With the persistent axes before the gathered axes, an all-gather
    over the gathered axes gives no device data from outside; in the reverse order, every device needs some.

    The law holds for ``nested`` boxes of any size. ``padded`` boxes keep it only where the axes divide the dim:
    9 rows sharded by 2 x 4 have a box 4:6, which overlaps both 0:5 and 5:9.
    """
    axes = tuple(axes)
    outside: list[int] = []
    for device, regions in enumerate(received(source, target)):
        group = set(mesh.group(device, axes))
        if any(group.isdisjoint(region.holders) for region in regions):
            outside.append(device)
    return tuple(outside)
