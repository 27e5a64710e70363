"""The boxes of devices under DTensor's placements, by their definition."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import Owned
from shardwright.core.boxes.placements import Placement, Replicate, placement_rows
from shardwright.core.mesh.mesh import Mesh


def placement_boxes(placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int], device: int) -> tuple[Box, ...]:
    """The boxes of ``device`` under ``placements``, by DTensor's definition: several if its rows have gaps."""
    assert len(placements) == len(mesh.axes), (placements, mesh)
    here = mesh.coordinates(device)
    applied = [(placement, axis.size, here[axis.name]) for placement, axis in zip(placements, mesh.axes, strict=True)]
    ranges = [
        placement_rows(size, [one for one in applied if not isinstance(one[0], Replicate) and one[0].dim == dim])
        for dim, size in enumerate(shape)
    ]
    return tuple(Box(tuple(a for a, _ in corner), tuple(b for _, b in corner)) for corner in product(*ranges))


def placed_boxes(placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int]) -> Owned:
    """The boxes of each device of the mesh under ``placements``."""
    return tuple(placement_boxes(placements, mesh, shape, device) for device in range(mesh.num_devices))
