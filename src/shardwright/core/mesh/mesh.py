"""A mesh of devices: named axes in the order of the devices, the last one fastest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from types import MappingProxyType

from shardwright.core.mesh.hashed import HashedOnce
from shardwright.core.mesh.hops import WholeSlice
from shardwright.core.mesh.spec import Spec

LINKS = ("ici", "dcn")
"""The links that an axis may use: fast ones, which is the default, or slow ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One mesh axis. ``link``: the link it uses (``ici``, ``dcn``), if the user set one."""

    name: str
    size: int
    link: str | None = None


@dataclass(frozen=True, slots=True)
class Mesh(HashedOnce):
    """Mesh axes, major first. Device ``d`` has the row-major coordinates of ``d`` over their sizes.

    ``whole_slice``: how collectives over all devices are done, if the devices are one slice of a torus that rewrites them.

    >>> mesh = Mesh.of(fsdp=2, expert=4)
    >>> mesh.num_devices, mesh.coordinates(6)
    (8, {'fsdp': 1, 'expert': 2})
    >>> mesh.group(6, ["fsdp"]), mesh.group(6, ["expert"])
    ((2, 6), (4, 5, 6, 7))
    """

    axes: tuple[Axis, ...]
    whole_slice: WholeSlice | None = None
    shape: Mapping[str, int] = field(init=False, repr=False, compare=False)
    """Size of each axis by name, in mesh order."""
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    outline: Mesh = field(init=False, repr=False, compare=False)
    """The same axes, each of size 1 or 2: that of all meshes with these names of which the same axes are larger than one. What follows from
    no more than this is derived once for all of them.

    >>> print(Mesh.of(data=1, fsdp=32).outline)
    data 1 x fsdp 2
    """

    def __post_init__(self) -> None:
        # Both are read many thousand times in a plan.
        object.__setattr__(self, "shape", MappingProxyType({axis.name: axis.size for axis in self.axes}))
        object.__setattr__(self, "names", tuple(self.shape))
        assert len(self.shape) == len(self.axes), self.axes
        assert all(axis.size >= 1 for axis in self.axes), self.axes
        is_outline = self.whole_slice is None and all(axis.size <= 2 and axis.link is None for axis in self.axes)
        outline = self if is_outline else _outline(self.names, tuple([axis.size > 1 for axis in self.axes]))
        object.__setattr__(self, "outline", outline)

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            return self.hash_of_key(self.axes, self.whole_slice)

    def __reduce__(self) -> tuple[type[Mesh], tuple[tuple[Axis, ...], WholeSlice | None]]:
        return Mesh, (self.axes, self.whole_slice)

    @classmethod
    def of(cls, **sizes: int) -> Mesh:
        """A mesh from names and sizes, major first."""
        return cls(tuple(Axis(name=name, size=size) for name, size in sizes.items()))

    @property
    def num_devices(self) -> int:
        return prod(axis.size for axis in self.axes)

    def size(self, axes: str | Iterable[str]) -> int:
        """Product of the sizes of the named axes (1 for none)."""
        shape = self.shape
        return shape[axes] if isinstance(axes, str) else prod([shape[name] for name in axes])

    def in_mesh_order(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes in mesh order."""
        wanted = set(axes)
        return tuple([name for name in self.names if name in wanted])

    def larger_than_one(self, axes: Iterable[str]) -> tuple[str, ...]:
        """The given axes without those of size 1, in the order given."""
        shape = self.shape
        return tuple([name for name in axes if shape[name] > 1])

    def sharding(self, spec: Spec) -> Spec:
        """A spec without axes of size 1, which shard nothing.

        >>> print(Mesh.of(data=2, fsdp=1).sharding(Spec.of(embed=["data", "fsdp"])))
        embed/data
        """
        return _sharding(self.outline, spec)

    def placed_alike(self, one: Spec, other: Spec) -> bool:
        """Whether two specs of a tensor place it in the same way."""
        return one is other or _placed_alike(self.outline, one, other)

    def coordinates(self, device: int) -> dict[str, int]:
        """Index of ``device`` along each axis."""
        indices: dict[str, int] = {}
        for axis in reversed(self.axes):
            device, indices[axis.name] = divmod(device, axis.size)
        return {name: indices[name] for name in self.names}

    def indices(self, axis: str) -> list[int]:
        """Index of every device along ``axis``.

        >>> Mesh.of(a=2, b=3).indices("b")
        [0, 1, 2, 0, 1, 2]
        """
        after = prod(one.size for one in self.axes[self.names.index(axis) + 1 :])
        size = self.shape[axis]
        return [device // after % size for device in range(self.num_devices)]

    def device(self, coordinates: Mapping[str, int]) -> int:
        """The device at the given coordinates; an axis left out counts as index 0."""
        number = 0
        for axis in self.axes:
            number = number * axis.size + coordinates.get(axis.name, 0)
        return number

    def group(self, device: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The devices that differ from ``device`` along ``axes`` only, ascending, ``device`` included."""
        free = set(axes)
        here = self.coordinates(device)
        members = [dict(here)]
        for axis in self.axes:
            if axis.name in free:
                members = [{**member, axis.name: index} for member in members for index in range(axis.size)]
        return tuple(sorted(self.device(member) for member in members))

    def numbers(self, axes: Sequence[str]) -> tuple[int, ...]:
        """For each device along ``axes``, major first as given, its number in mesh order.

        >>> Mesh.of(a=2, b=3).numbers(["b", "a"])
        (0, 3, 1, 4, 2, 5)
        """
        counted = Mesh(tuple(axis for axis in self.axes if axis.name in axes))
        places = product(*(range(self.size(axis)) for axis in axes))
        return tuple(counted.device(dict(zip(axes, place, strict=True))) for place in places)

    def __str__(self) -> str:
        return " x ".join(f"{axis.name} {axis.size}" for axis in self.axes)


@lru_cache(maxsize=8192)
def _placed_alike(outline: Mesh, one: Spec, other: Spec) -> bool:
    return one == other or outline.sharding(one) == outline.sharding(other)


@lru_cache(maxsize=4096)
def _sharding(outline: Mesh, spec: Spec) -> Spec:
    return spec.without(axis.name for axis in outline.axes if axis.size == 1)


@lru_cache(maxsize=1024)
def _outline(names: tuple[str, ...], larger: tuple[bool, ...]) -> Mesh:
    return Mesh(tuple(Axis(name=name, size=1 + more) for name, more in zip(names, larger, strict=True)))
