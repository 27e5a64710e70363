"""Gathers and scatters over a whole slice of a torus, taken in two hops.

What libtpu does with a collective over all devices of a slice at once (0.0.42, measured; ``chips.toml`` has the sizes
from which on it does so):

| asked for | made | sent by each device |
|---|---|---|
| a reduce-scatter of N bytes | an all-reduce, and a slice of it | 2 N in place of N |
| an all-gather to N bytes | an all-reduce of parts among zeros | 2 N in place of N |

A collective over a part of the slice stays what it was. So one over the whole slice goes in two: over the **minor** part,
which lies along the last dim of the torus, or over the last of several mesh axes; and over the **major** part, the rest.
What each device sends is the same to the byte, (n - 1) / n of N in all: a gather takes the minor part first, a scatter
the major one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSlice:
    """How collectives over a whole slice go. ``minor``: devices along its last dim, one after another.

    ``gathers``, ``scatters``: the most devices of a slice over all of which one stays what it was.
    """

    minor: int
    gathers: float = inf
    scatters: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """Of the devices of one mesh axis, those that take a hop together: ``minor`` neighbours, or one in ``minor``."""

    which: Literal["minor", "major"]
    minor: int
    major: int

    @property
    def size(self) -> int:
        return self.minor if self.which == "minor" else self.major

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups, by their devices' indices along the axis.

        >>> SubGroup(which="minor", minor=2, major=4).groups
        ((0, 1), (2, 3), (4, 5), (6, 7))
        >>> SubGroup(which="major", minor=2, major=4).groups
        ((0, 2, 4, 6), (1, 3, 5, 7))
        """
        devices = range(self.minor * self.major)
        if self.which == "minor":
            return tuple(tuple(devices[first : first + self.minor]) for first in devices[:: self.minor])
        return tuple(tuple(devices[first :: self.minor]) for first in range(self.minor))


class Hop(NamedTuple):
    """One hop: over these axes, or a part of the only one; ``elements`` of its operand or result, the larger."""

    axes: tuple[str, ...]
    subgroup: SubGroup | None
    elements: int


def hops(
    kind: str, sizes: Mapping[str, int], elements: int, slice_devices: int, whole: WholeSlice | None
) -> Iterator[Hop]:
    """The hops of a collective over the axes of ``sizes``, major first: one, or two where it goes over a whole slice.

    ``elements``: of the collective's operand or result on one device, the larger.

    >>> whole = WholeSlice(minor=2, scatters=4)
    >>> for hop in hops("reduce-scatter", {"fsdp": 8}, 64, 8, whole):
    ...     print(hop.axes, hop.subgroup.which, hop.elements)
    ('fsdp',) major 64
    ('fsdp',) minor 16
    >>> [tuple(hop) for hop in hops("reduce-scatter", {"fsdp": 4, "expert": 2}, 64, 8, whole)]
    [(('fsdp',), None, 64), (('expert',), None, 16)]
    >>> [tuple(hop) for hop in hops("reduce-scatter", {"fsdp": 4}, 64, 8, whole)]
    [(('fsdp',), None, 64)]
    """
    axes, devices = tuple(sizes), prod(sizes.values())
    limit = inf if whole is None else {"all-gather": whole.gathers, "reduce-scatter": whole.scatters}.get(kind, inf)
    if whole is None or devices != slice_devices or devices <= limit:
        yield Hop(axes, None, elements)
        return
    if len(axes) > 1:
        ends = (axes[-1:], None), (axes[:-1], None)
        major = devices // sizes[axes[-1]]
    elif devices % whole.minor == 0 and 1 < whole.minor < devices:
        major = devices // whole.minor
        ends = tuple((axes, SubGroup(which=which, minor=whole.minor, major=major)) for which in ("minor", "major"))
    else:
        yield Hop(axes, None, elements)
        return
    minor_hop, major_hop = Hop(*ends[0], ceil(elements / major)), Hop(*ends[1], elements)
    yield from (minor_hop, major_hop) if kind == "all-gather" else (major_hop, minor_hop)
