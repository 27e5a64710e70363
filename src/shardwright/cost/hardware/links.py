"""Which links the axes of a mesh use on a machine.

Devices are numbered in mesh order, the last axis fastest; axes whose entry has ``link: dcn`` come first. A **domain**
is a torus slice, or a node of GPUs on a switch. An axis is inside a domain, across domains, or partly both. Inside a
torus the axes take its dims one after another, in the order of dims that splits the fewest of them.

| mesh, machine | axis | its links |
|---|---|---|
| fsdp 16 x tensor 8, h100:16x8 | tensor | 8 of a node |
| | fsdp | 16 nodes, one GPU of each |
| data 2 x fsdp 64, v5p:4x4x4*2 | fsdp | three rings of 4 |
| | data | 2 slices |
| fsdp 8 x expert 2, v5e:4x4 | expert | a line of 2 neighbours |
| | fsdp | a line of 4, and one of 2 that shares each link with the neighbours of `expert` |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, permutations
from math import gcd, prod

from shardwright.core.mesh.hops import SubGroup
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.cost.hardware.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The devices of a group along one dim of a torus: ``size`` of them, each ``stride`` hops from the next.

    ``closed``: a ring, where the last is as near to the first. ``sharing``: how many groups send over the same links
    at the same time. ``on_chip``: between the devices of one chip.
    """

    size: int
    stride: int = 1
    closed: bool = False
    sharing: int = 1
    on_chip: bool = False

    @property
    def hops(self) -> int:
        """Hops from one device to the farthest other."""
        return (self.size // 2 if self.closed else self.size - 1) * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The devices of a collective: ``inside`` devices in each of ``domains`` domains.

    ``lines``: the lines inside a torus; none on a switch.
    """

    inside: int
    domains: int
    lines: tuple[Line, ...] = ()

    @property
    def size(self) -> int:
        return self.inside * self.domains


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What an axis takes of one dim of a domain. ``aligned`` False: its size does not fit what is left of the dim."""

    dim: int
    size: int
    stride: int
    aligned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dim:
    """One dim of a torus; ``number`` in the machine's shape, or None for the devices of one chip."""

    number: int | None
    size: int
    wraps: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MeshMapping:
    """A mesh mapped to a machine: the segments of each axis inside a domain, fastest first, and how many domains. Equal to itself alone."""

    machine: Machine
    dims: tuple[Dim, ...]
    segments: Mapping[str, tuple[Segment, ...]]
    domains: Mapping[str, int]

    def group(self, axes: Iterable[str], subgroup: SubGroup | None = None) -> Group:
        """The group over the given axes, or over a sub-group of the only one."""
        return _group(self, tuple(axes), subgroup)

    def is_part_of_ring(self, axis: str) -> bool:
        """Whether the axis takes only a part of a dim that wraps around, so that its line is open."""
        return any(
            self.dims[segment.dim].wraps and segment.stride * segment.size < self.dims[segment.dim].size
            for segment in self.segments[axis]
        )


@lru_cache(maxsize=1024)
def _group(mapping: MeshMapping, axes: tuple[str, ...], subgroup: SubGroup | None) -> Group:
    segments = [segment for axis in axes for segment in mapping.segments[axis]]
    if subgroup is not None:
        segments = list(_inside(segments, subgroup))
    return Group(
        inside=prod(segment.size for segment in segments),
        domains=prod(mapping.domains[axis] for axis in axes),
        lines=tuple(_lines(mapping.dims, segments)),
    )


@lru_cache(maxsize=64)
def map_mesh(mesh: Mesh, machine: Machine) -> MeshMapping:
    """Map a mesh to a machine with the same number of devices."""
    assert machine.numbers is not None
    assert mesh.num_devices == machine.num_devices, (str(mesh), machine)
    torus = machine.numbers.network == "torus"
    inside, domains = _split_at_domains(_in_device_order(mesh), machine.domain_devices)
    orders = _dim_orders(machine) if torus else ((Dim(number=None, size=machine.domain_devices, wraps=False),),)
    found = ((dims, _segments(inside, dims)) for dims in orders)
    dims, segments = min(found, key=lambda one: _misfits(*one))
    return MeshMapping(machine=machine, dims=dims if torus else (), segments=segments, domains=domains)


def _in_device_order(mesh: Mesh) -> tuple[Axis, ...]:
    return (*(a for a in mesh.axes if a.link == "dcn"), *(a for a in mesh.axes if a.link != "dcn"))


def _split_at_domains(axes: Sequence[Axis], in_domain: int) -> tuple[list[Axis], dict[str, int]]:
    """Split each axis into its size inside a domain and the number of domains that it spans.

    An axis counts as outside if its groups would be split differently between domains.
    """
    inside, domains, stride = [], {}, 1
    for axis in reversed(axes):
        within = min(axis.size, max(1, in_domain // stride))
        if in_domain % (stride * within) or axis.size % within:
            within = 1
        inside.insert(0, Axis(name=axis.name, size=within))
        domains[axis.name] = axis.size // within
        stride *= axis.size
    return inside, domains


def _dim_orders(machine: Machine) -> tuple[tuple[Dim, ...], ...]:
    """The dims of a torus in every order, fastest first; the devices of one chip are always next to each other."""
    assert machine.numbers is not None
    multiple = machine.numbers.integer("wraps_at_multiples_of_chips")
    chip = (Dim(number=None, size=machine.devices_per_chip, wraps=False),) if machine.devices_per_chip > 1 else ()
    dims = [Dim(number=n, size=size, wraps=size % multiple == 0) for n, size in enumerate(machine.shape)]
    return tuple((*chip, *order) for order in permutations(reversed(dims)))


def _segments(axes: Sequence[Axis], dims: Sequence[Dim]) -> dict[str, tuple[Segment, ...]]:
    """What each axis takes of the dims: the last axis goes first and takes from the first dim."""
    found: dict[str, tuple[Segment, ...]] = {}
    number, stride, aligned = 0, 1, True
    for axis in reversed(axes):
        rest, segments = axis.size, []
        while rest > 1 and aligned:
            while stride == dims[number].size:
                number, stride = number + 1, 1
            size = gcd(rest, dims[number].size // stride)
            if size == 1:
                aligned = False
            else:
                segments.append(Segment(dim=number, size=size, stride=stride))
                stride, rest = stride * size, rest // size
        if rest > 1:
            segments.append(Segment(dim=number, size=rest, stride=1, aligned=False))
        found[axis.name] = tuple(segments)
    return found


def _inside(segments: Iterable[Segment], subgroup: SubGroup) -> Iterable[Segment]:
    """What a sub-group takes of the segments of its axis, fastest first."""
    spans = [(prod(subgroup.sizes[dim + 1 :]), prod(subgroup.sizes[dim:])) for dim in subgroup.over]
    first = 1
    for segment in segments:
        last = first * segment.size
        for start, stop in spans:
            low, high = max(first, start), min(last, stop)
            if high > low:
                yield replace(segment, size=high // low, stride=segment.stride * (low // first))
        first = last


def _misfits(dims: Sequence[Dim], segments: Mapping[str, tuple[Segment, ...]]) -> tuple[int, int]:
    """How many segments are not entire dims: those that are not aligned, then those that are a part of a ring."""
    every = [segment for ones in segments.values() for segment in ones]
    return (
        sum(not segment.aligned for segment in every),
        sum(segment.aligned and dims[segment.dim].wraps and segment.size < dims[segment.dim].size for segment in every),
    )


def _lines(dims: Sequence[Dim], segments: Sequence[Segment]) -> Iterable[Line]:
    """The lines of a group, one for each dim; adjacent segments of a dim form one line."""
    chip = next((n for n, dim in enumerate(dims) if dim.number is None), None)
    on_chip = prod(segment.size for segment in segments if segment.dim == chip)
    on_other_devices = 1 if chip is None else dims[chip].size // on_chip
    for number, dim in enumerate(dims):
        own = sorted((p for p in segments if p.dim == number), key=lambda segment: segment.stride)
        if not own:
            continue
        size = prod(segment.size for segment in own)
        dense = all(a.stride * a.size == b.stride for a, b in pairwise(own))
        # Segments that are not adjacent have the stride of the outer one.
        stride = own[0].stride if dense else own[-1].stride
        closed = dim.wraps and dense and all(p.aligned for p in own) and stride * size == dim.size
        yield Line(
            size=size,
            stride=stride,
            closed=closed,
            sharing=stride * (1 if number == chip else on_other_devices),
            on_chip=number == chip,
        )
