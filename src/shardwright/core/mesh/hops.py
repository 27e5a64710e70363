"""All-gathers and reduce-scatters over an entire slice of a torus: as one collective, in two hops, or in chunks.

libtpu rewrites a collective over all devices of a slice (0.0.42, measured; ``chips.toml`` has the sizes from which it
does so):

| requested | compiled to | sent by each device |
|---|---|---|
| a reduce-scatter of N bytes | an all-reduce, and a slice of it | 2 N in place of N |
| an all-gather to N bytes | an all-reduce of shards padded with zeros | 2 N in place of N |

A gather over a part of the slice is not rewritten, and few scatters are (``docs/schedules.md``). So there are three ways:

| way | collectives | sent by each device | links in use |
|---|---|---|---|
| ``one`` | one, which is compiled to an all-reduce | 2 N | those of all dims |
| ``two`` | two **hops**: over some dims of the torus, then over the others | N | those of one hop at a time |
| ``chunks`` | a hop for each dim, of each of as many chunks as there are dims; the chunks take the dims in rotated orders | N | those of all dims, where hops run at the same time |

A gather takes the hops of a **route** in their order, a reduce-scatter in the reverse order. The last hop of a gather has nearly
all of the bytes, so the links of its dims decide its time. Which way takes the least is the machine's (``cost/choices/hops.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import ceil, gcd, inf, prod
from typing import Literal, NamedTuple

Way = Literal["one", "two", "chunks"]
WAYS: tuple[Way, ...] = ("one", "two", "chunks")
AUTO = "auto"
"""In place of a way: the one that takes the least time, or without times, that sends the fewest bytes."""

Route = tuple[tuple[tuple[int, ...], ...], ...]
"""The hops of each chunk, in the order of a gather: the dims of the slice that each is over. None of any chunk: one collective."""
ONE: Route = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSlice:
    """How collectives over an entire slice are done. ``dims``: devices along each of its dims, major first; where a chip has several
    devices, they are the last dim, of size ``on_chip``.

    ``gathers``, ``scatters``: the largest number of devices of a slice over which a collective is not rewritten. ``route`` None: that
    of ``two``, along the last dim first.
    """

    dims: tuple[int, ...]
    on_chip: int = 1
    gathers: float = inf
    scatters: float = inf
    route: Route | None = None

    def by(self, way: str) -> WholeSlice:
        """The same with the first route of a way; ``auto`` as ``two``. A route that is given already stays."""
        if self.route is not None:
            return self
        found = self.routes(way) if way != AUTO else self.routes("two")
        return replace(self, route=found[0] if found else ONE)

    def routes(self, way: str) -> tuple[Route, ...]:
        """The routes of a way; of two hops that along the last dim first. ``auto``: all, also along other dims first.

        >>> WholeSlice(dims=(4, 8)).routes("chunks")
        ((((0,), (1,)), ((1,), (0,))),)
        """
        if way == AUTO:
            return (ONE, *self._of_two, *self._of_chunks)
        return {"one": (ONE,), "two": self._of_two[:1], "chunks": self._of_chunks}[way]

    def text(self, route: Route) -> str:
        """A route in words: the dims of a torus are x, y and z.

        >>> WholeSlice(dims=(4, 4, 8)).text((((2,), (0, 1)),))
        'two: z, then x y'
        """
        if not route:
            return "one"
        if len(route) > 1:
            return "chunks"
        return "two: " + ", then ".join(" ".join(self._name(dim) for dim in hop) for chunk in route for hop in chunk)

    def _name(self, dim: int) -> str:
        return "chip" if self.on_chip > 1 and dim == len(self.dims) - 1 else "xyz"[dim]

    @property
    def _of_two(self) -> tuple[Route, ...]:
        dims = self._larger
        parts = [(dims[place:], dims[:place]) for place in range(len(dims) - 1, 0, -1)]
        if self.on_chip > 1:
            # First in the list: a chip's devices go with the last dim of the torus.
            parts = [*parts[1:], *parts[:1]]
        return tuple(((one, other),) for one, other in (*parts, *((major, minor) for minor, major in parts)))

    @property
    def _of_chunks(self) -> tuple[Route, ...]:
        chip = ((len(self.dims) - 1,),) if self.on_chip > 1 else ()
        dims = [dim for dim in self._larger if (dim,) not in chip]
        orders = [dims[place:] + dims[:place] for place in range(len(dims))]
        return (tuple((*chip, *((dim,) for dim in order)) for order in orders),) if len(dims) > 1 else ()

    @property
    def _larger(self) -> tuple[int, ...]:
        return tuple(number for number, size in enumerate(self.dims) if size > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """The groups of devices of one mesh axis in one hop: they differ along the dims ``over`` of ``sizes``, major first, into which the axis
    is divided."""

    sizes: tuple[int, ...]
    over: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.sizes[dim] for dim in self.over)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups, as indices along the axis.

        >>> SubGroup(sizes=(4, 2), over=(1,)).groups
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> SubGroup(sizes=(4, 2), over=(0,)).groups
        ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        strides = [prod(self.sizes[dim + 1 :]) for dim in range(len(self.sizes))]
        rest = [dim for dim in range(len(self.sizes)) if dim not in self.over]

        def places(dims: list[int]) -> list[int]:
            spans = product(*(range(self.sizes[dim]) for dim in dims))
            return [sum(at * strides[dim] for at, dim in zip(one, dims, strict=True)) for one in spans]

        members = places(list(self.over))
        return tuple(tuple(first + member for member in members) for first in places(rest))


class Beside(NamedTuple):
    """A hop of another chunk that runs at the same time: its devices, and its elements for each of this hop's."""

    axes: tuple[str, ...]
    subgroup: SubGroup | None
    share: float


class Hop(NamedTuple):
    """One hop over these axes, or over ``subgroup`` of a single axis. ``digits``: the dims that it is over, as places in
    ``Hops.sizes``. ``elements`` of its operand or result, the larger. ``beside``: of other chunks. ``is_last``: of a gather, the first
    of a reduce-scatter."""

    axes: tuple[str, ...]
    subgroup: SubGroup | None
    digits: tuple[int, ...]
    elements: int
    beside: tuple[Beside, ...] = ()
    is_last: bool = False


class Hops(NamedTuple):
    """The hops of a collective, in the order of a gather. ``sizes``: of the dims into which its axes are divided, major first."""

    sizes: tuple[int, ...]
    chunks: tuple[tuple[Hop, ...], ...]

    @property
    def in_place(self) -> bool:
        """Whether each hop of a gather puts its shards beside those that are there, so that nothing is rearranged."""
        return len(self.chunks) == 1 and _follow(self.chunks[0])


def _follow(hops: tuple[Hop, ...]) -> bool:
    found: list[int] = []
    for hop in hops:
        found = [*hop.digits, *found]
    return found == sorted(found) and all(
        tuple(hop.digits) == tuple(range(hop.digits[0], hop.digits[-1] + 1)) for hop in hops
    )


def rewritten(kind: str, devices: int, slice_devices: int, whole: WholeSlice | None) -> bool:
    """Whether a compiler makes an all-reduce of a collective."""
    limits = {} if whole is None else {"all-gather": whole.gathers, "reduce-scatter": whole.scatters}
    return devices == slice_devices and devices > limits.get(kind, inf)


def hops_of(axes: tuple[str, ...], mesh_sizes: Mapping[str, int], elements: int, whole: WholeSlice) -> Hops | None:
    """The hops of a collective over ``axes``, major first, which are the entire mesh; None where it stays one collective, or where the
    axes do not have the dims of its route.

    ``elements``: those of the collective's operand or result on one device, the larger.

    >>> whole = WholeSlice(dims=(4, 2), route=(((1,), (0,)),))
    >>> [(hop.axes, hop.subgroup.over, hop.elements) for hop in hops_of(("fsdp",), {"fsdp": 8}, 64, whole).chunks[0]]
    [(('fsdp',), (1,), 16), (('fsdp',), (0,), 64)]
    >>> hops = hops_of(("fsdp", "expert"), {"fsdp": 4, "expert": 2}, 64, whole)
    >>> [(hop.axes, hop.subgroup, hop.elements) for hop in hops.chunks[0]]
    [(('expert',), None, 16), (('fsdp',), None, 64)]
    """
    divided = _divided_hops(axes, tuple(mesh_sizes.items()), whole)
    if divided is None:
        return None
    sizes, chunks = divided
    sized = tuple(tuple(_sized(chunk, sizes, elements / len(chunks))) for chunk in chunks)
    return _at_once(Hops(sizes, sized)) if len(chunks) > 1 else Hops(sizes, sized)


@lru_cache(maxsize=1024)
def _divided_hops(
    axes: tuple[str, ...], sizes_of: tuple[tuple[str, int], ...], whole: WholeSlice
) -> tuple[tuple[int, ...], tuple[tuple[Hop, ...], ...]] | None:
    """The sizes of the digits and the hops of each chunk, before their elements are known."""
    mesh_sizes, route = dict(sizes_of), whole.route or ONE
    divided = _divided(mesh_sizes, whole.dims) or {}
    digits = [(axis, *one) for axis in axes for one in divided.get(axis, ())]
    chunks: list[list[Hop | None]] = [[_hop(axes, digits, dims, mesh_sizes) for dims in chunk] for chunk in route]
    if len(chunks) == 1 and len(axes) > 1 and not all(hop for chunk in chunks for hop in chunk):
        # Dims of the torus that mesh axes divide otherwise: a hop over the last axis, and one over the others.
        digits = [(axis, 0, mesh_sizes[axis]) for axis in axes]
        last = len(axes) - 1
        chunks = [[Hop(axes[-1:], None, (last,), 0), Hop(axes[:-1], None, tuple(range(last)), 0)]]
    known = tuple(tuple(hop for hop in chunk if hop) for chunk in chunks)
    if not chunks or [*map(len, known)] != [*map(len, chunks)]:
        return None
    return tuple(size for *_, size in digits), known


def has_dims(axes: tuple[str, ...], mesh_sizes: Mapping[str, int], whole: WholeSlice) -> bool:
    """Whether each hop of the route is over entire axes of the mesh, or over a part of one of them."""
    return _has_dims(axes, tuple(mesh_sizes.items()), whole)


@lru_cache(maxsize=1024)
def _has_dims(axes: tuple[str, ...], sizes_of: tuple[tuple[str, int], ...], whole: WholeSlice) -> bool:
    mesh_sizes = dict(sizes_of)
    divided = _divided(mesh_sizes, whole.dims) or {}
    digits = [(axis, *one) for axis in axes for one in divided.get(axis, ())]
    return all(_hop(axes, digits, dims, mesh_sizes) is not None for chunk in whole.route or ONE for dims in chunk)


def _sized(chunk: Iterable[Hop], sizes: tuple[int, ...], elements: float) -> Iterator[Hop]:
    gathered = elements / prod(sizes)
    for hop in chunk:
        gathered *= prod(sizes[place] for place in hop.digits)
        yield hop._replace(elements=ceil(gathered), is_last=round(gathered) == round(elements))


def _hop(
    axes: tuple[str, ...], digits: list[tuple[str, int, int]], dims: tuple[int, ...], sizes: Mapping[str, int]
) -> Hop | None:
    """A hop over some dims of the slice: over entire axes, or over a part of one axis."""
    places = tuple(place for place, (_, dim, _) in enumerate(digits) if dim in dims)
    over = tuple(axis for axis in axes if any(digits[place][0] == axis for place in places))
    if not over:
        return None
    if prod(sizes[axis] for axis in over) == prod(digits[place][2] for place in places):
        return Hop(over, None, places, 0)
    if len(over) > 1:
        return None
    own = [place for place, (axis, *_) in enumerate(digits) if axis in over]
    inside = tuple(digits[place][2] for place in own)
    subgroup = SubGroup(sizes=inside, over=tuple(own.index(place) for place in places))
    return Hop(over, subgroup, places, 0)


def _at_once(hops: Hops) -> Hops:
    """With the hops of other chunks that run at the same time as each."""
    chunks = []
    for chunk in hops.chunks:
        others = [one for one in hops.chunks if one is not chunk]
        chunks.append(
            tuple(
                hop._replace(
                    beside=tuple(
                        Beside(one[turn].axes, one[turn].subgroup, one[turn].elements / max(1, hop.elements))
                        for one in others
                    )
                )
                for turn, hop in enumerate(chunk)
            )
        )
    return hops._replace(chunks=tuple(chunks))


def _divided(sizes: Mapping[str, int], dims: tuple[int, ...]) -> dict[str, tuple[tuple[int, int], ...]] | None:
    """Of each mesh axis the dims of the slice that it takes and how much of each, major first; None where they do not fit. ``sizes``: in
    mesh order. The last axis takes from the last dim."""
    left = [*dims]
    found: dict[str, tuple[tuple[int, int], ...]] = {}
    for axis in reversed(tuple(sizes)):
        rest, parts = sizes[axis], []
        for dim in range(len(left) - 1, -1, -1):
            if left[dim] == 1 or rest == 1:
                continue
            size = gcd(rest, left[dim])
            if size == 1 or (size < left[dim] and size < rest):
                return None
            parts.append((dim, size))
            left[dim], rest = left[dim] // size, rest // size
        if rest > 1:
            return None
        found[axis] = tuple(reversed(parts))
    return found


def split_dim(shape: tuple[int, ...], dim: int, chunks: int) -> int:
    """The dim along which a shard that is gathered along ``dim`` is divided into chunks: the largest other one, else itself.

    >>> split_dim((28, 16, 128), 0, 3), split_dim((28,), 0, 3)
    (2, 0)
    """
    others = [place for place, size in enumerate(shape) if place != dim and size >= chunks]
    return max(others, key=lambda place: shape[place], default=dim)


def in_order(kind: str, hops: Hops) -> Iterator[Hop]:
    """The hops of every chunk, those of a reduce-scatter in reverse order."""
    for chunk in hops.chunks:
        yield from chunk if kind == "all-gather" else reversed(chunk)
