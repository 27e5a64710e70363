"""The mesh axes along which the devices of a program's groups differ, also for programs of one slice of several.

A program numbers the devices of one slice. Transfers to other slices are not collectives of those devices. The axes
across slices are those with ``link: dcn``, else the major axes, until all slices are used.

| mesh | slices | axes inside a slice | axes across slices |
|---|---|---|---|
| data 2 x fsdp 8 | 2 | fsdp 8 | data |
| data 4 x fsdp 4 | 2 | data 2 x fsdp 4 | data |
| fsdp 8 x data 2 (dcn) | 2 | fsdp 8 | data |
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from shardwright.compiled.text.groups import Groups, axes_along
from shardwright.core.findings.errors import InputError
from shardwright.core.mesh.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbering:
    """``sizes``: of each axis inside a slice. ``across_slices``: the axes that span the ``num_slices`` slices."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    num_devices: int
    num_slices: int = 1
    across_slices: tuple[str, ...] = ()

    def axes(self, groups: Groups) -> tuple[str, ...]:
        """The axes along which the devices of groups, or the ends of pairs, differ, in mesh order."""
        return axes_along(groups, self.names, self.sizes)


def numbering(mesh: Mesh, num_partitions: int | None) -> Numbering:
    """How a program with this many partitions numbers the devices of a mesh. Raises InputError if it cannot match.

    >>> found = numbering(Mesh.of(data=4, fsdp=4), 8)
    >>> found.sizes, found.across_slices, found.axes(((0, 4),)), found.axes(((0, 1),))
    ((2, 4), ('data',), ('data',), ('fsdp',))
    """
    number = mesh.num_devices if num_partitions is None else num_partitions
    if mesh.num_devices % number:
        raise InputError(
            f"The program is for {number} devices, and the mesh {mesh} has {mesh.num_devices}, which is not a multiple of "
            f"{number}: read the program with the mesh that it was compiled for."
        )
    num_slices = left = mesh.num_devices // number
    inside = {axis.name: axis.size for axis in mesh.axes}
    for axis in sorted(mesh.axes, key=lambda axis: axis.link != "dcn"):
        across = gcd(left, axis.size)
        left, inside[axis.name] = left // across, axis.size // across
    return Numbering(
        names=mesh.names,
        sizes=tuple(inside.values()),
        num_devices=number,
        num_slices=num_slices,
        across_slices=tuple(axis.name for axis in mesh.axes if inside[axis.name] < axis.size),
    )
