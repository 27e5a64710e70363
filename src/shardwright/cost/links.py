"""Which links the axes of a mesh cross on a machine.

The mesh is laid over the devices in its own order, the last axis fastest; axes whose entry says ``link: dcn`` come
first. A **domain** is a slice of a torus, or a node of GPUs on a switch: an axis lies inside it, outside it, or partly
both. Inside a torus the axes take its dims in turn, in that order of the dims which leaves the most of them whole.

| mesh, machine | axis | where it lies |
|---|---|---|
| fsdp 16 x tensor 8, h100:16x8 | tensor | 8 of a node |
| | fsdp | 16 nodes, one GPU of each |
| data 2 x fsdp 64, v5p:4x4x4*2 | fsdp | three rings of 4 |
| | data | 2 slices |
| fsdp 8 x expert 2, v5e:4x4 | expert | a line of 2 neighbours |
| | fsdp | a line of 4, and one of 2 that share each link with the experts' neighbours |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, permutations
from math import gcd, prod

from shardwright.core.mesh.hops import SubGroup
from shardwright.core.mesh.mesh import Axis, Mesh
from shardwright.cost.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The part of a group along one dim of a torus: ``size`` devices, each ``stride`` hops from the next.

    ``closed``: the last is as near to the first. ``sharing``: groups that send over the same links at the same time.
    """

    size: int
    stride: int = 1
    closed: bool = False
    sharing: int = 1

    @property
    def hops(self) -> int:
        """From one device to the farthest other."""
        return (self.size // 2 if self.closed else self.size - 1) * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Devices that a collective joins: ``inside`` of each domain, in ``domains`` of them.

    ``lines``: how those inside a torus lie; none on a switch.
    """

    inside: int
    domains: int
    lines: tuple[Line, ...] = ()

    @property
    def size(self) -> int:
        return self.inside * self.domains


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Laid:
    """A mesh laid over a machine: for each axis its pieces inside a domain, fastest first, and how many domains."""

    machine: Machine
    dims: tuple[Dim, ...]
    pieces: Mapping[str, tuple[Piece, ...]]
    domains: Mapping[str, int]

    def group(self, axes: Iterable[str], part: SubGroup | None = None) -> Group:
        """The group of the given axes together, or of a part of the only one."""
        axes = tuple(axes)
        pieces = [piece for axis in axes for piece in self.pieces[axis]]
        if part is not None:
            near = [p for n, p in enumerate(pieces, 1) if prod(piece.size for piece in pieces[:n]) <= part.minor]
            pieces = near if part.which == "minor" else pieces[len(near) :]
        return Group(
            inside=prod(piece.size for piece in pieces),
            domains=prod(self.domains[axis] for axis in axes),
            lines=tuple(_lines(self.dims, pieces)),
        )

    def is_split(self, axis: str) -> bool:
        """Whether a torus that wraps around where the axis lies does not do so for the axis, which has a part of a dim."""
        return any(
            self.dims[piece.dim].wraps and piece.stride * piece.size < self.dims[piece.dim].size
            for piece in self.pieces[axis]
        )


def lay(mesh: Mesh, machine: Machine) -> Laid:
    """Lay a mesh over a machine that has as many devices."""
    assert machine.numbers is not None
    assert mesh.num_devices == machine.num_devices, (str(mesh), machine)
    torus = machine.numbers.network == "torus"
    inside, domains = _parted(_in_device_order(mesh), machine.domain_devices)
    orders = _orders(machine) if torus else ((Dim(number=None, size=machine.domain_devices, wraps=False),),)
    found = ((dims, _pieces(inside, dims)) for dims in orders)
    dims, pieces = min(found, key=lambda one: _broken(*one))
    return Laid(machine=machine, dims=dims if torus else (), pieces=pieces, domains=domains)


def _in_device_order(mesh: Mesh) -> tuple[Axis, ...]:
    return (*(a for a in mesh.axes if a.link == "dcn"), *(a for a in mesh.axes if a.link != "dcn"))


def _parted(axes: Sequence[Axis], in_domain: int) -> tuple[list[Axis], dict[str, int]]:
    """Each axis' part inside a domain, and how many domains it spans.

    An axis whose groups would lie across the border of domains in different ways is taken to be outside.
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


def _orders(machine: Machine) -> tuple[tuple[Dim, ...], ...]:
    """The dims of a torus in every order, fastest first; the devices of one chip are always next to each other."""
    assert machine.numbers is not None
    multiple = machine.numbers.whole("wraps_at_multiples_of_chips")
    chip = (Dim(number=None, size=machine.devices_per_chip, wraps=False),) if machine.devices_per_chip > 1 else ()
    dims = [Dim(number=n, size=size, wraps=size % multiple == 0) for n, size in enumerate(machine.shape)]
    return tuple((*chip, *order) for order in permutations(reversed(dims)))


def _pieces(axes: Sequence[Axis], dims: Sequence[Dim]) -> dict[str, tuple[Piece, ...]]:
    """What each axis takes of the dims: the last axis first, of the first dim first."""
    found: dict[str, tuple[Piece, ...]] = {}
    number, stride, aligned = 0, 1, True
    for axis in reversed(axes):
        rest, pieces = axis.size, []
        while rest > 1 and aligned:
            while stride == dims[number].size:
                number, stride = number + 1, 1
            size = gcd(rest, dims[number].size // stride)
            if size == 1:
                aligned = False
            else:
                pieces.append(Piece(dim=number, size=size, stride=stride))
                stride, rest = stride * size, rest // size
        if rest > 1:
            pieces.append(Piece(dim=number, size=rest, stride=1, aligned=False))
        found[axis.name] = tuple(pieces)
    return found


def _broken(dims: Sequence[Dim], pieces: Mapping[str, tuple[Piece, ...]]) -> tuple[int, int]:
    """How far from whole dims the pieces are: those that do not fit at all, then those that are a part of a ring."""
    every = [piece for ones in pieces.values() for piece in ones]
    return (
        sum(not piece.aligned for piece in every),
        sum(piece.aligned and dims[piece.dim].wraps and piece.size < dims[piece.dim].size for piece in every),
    )


def _lines(dims: Sequence[Dim], pieces: Sequence[Piece]) -> Iterable[Line]:
    """The pieces of a group dim by dim; neighbouring pieces of one dim make one line."""
    chip = next((n for n, dim in enumerate(dims) if dim.number is None), None)
    on_chip = prod(piece.size for piece in pieces if piece.dim == chip)
    beside = 1 if chip is None else dims[chip].size // on_chip
    for number, dim in enumerate(dims):
        own = sorted((p for p in pieces if p.dim == number), key=lambda piece: piece.stride)
        if not own:
            continue
        size = prod(piece.size for piece in own)
        dense = all(a.stride * a.size == b.stride for a, b in pairwise(own))
        # Pieces with others between them are as far apart as the farther of them.
        stride = own[0].stride if dense else own[-1].stride
        closed = dim.wraps and dense and all(p.aligned for p in own) and stride * size == dim.size
        yield Line(size=size, stride=stride, closed=closed, sharing=stride * (1 if number == chip else beside))
