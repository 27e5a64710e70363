"""All-gathers and reduce-scatters over an entire slice of a torus, done in two hops.

libtpu rewrites a collective over all devices of a slice (0.0.42, measured; ``chips.toml`` has the sizes from which it
does so):

| requested | compiled to | sent by each device |
|---|---|---|
| a reduce-scatter of N bytes | an all-reduce, and a slice of it | 2 N in place of N |
| an all-gather to N bytes | an all-reduce of shards padded with zeros | 2 N in place of N |

A collective over a part of the slice is not rewritten. So a collective over the entire slice is done in two hops. The
**minor** hop is along the last dim of the torus, or over the last of several mesh axes. The **major** hop is over the rest.
Each device sends exactly the same bytes as in one hop, (n - 1) / n of N in total: an all-gather does the minor hop first,
a reduce-scatter the major one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil, inf, prod
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeSlice:
    """How collectives over an entire slice are done. ``minor``: the number of devices along its last dim, consecutive.

    ``gathers``, ``scatters``: the largest number of devices of a slice over which a collective is not rewritten.
    """

    minor: int
    gathers: float = inf
    scatters: float = inf


@dataclass(frozen=True, slots=True, kw_only=True)
class SubGroup:
    """The groups of devices of one mesh axis in one hop: ``minor`` neighbours, or every ``minor``-th device."""

    which: Literal["minor", "major"]
    minor: int
    major: int

    @property
    def size(self) -> int:
        return self.minor if self.which == "minor" else self.major

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The groups, as indices along the axis.

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
    """One hop over these axes, or over ``subgroup`` of a single axis; ``elements`` of its operand or result, the larger."""

    axes: tuple[str, ...]
    subgroup: SubGroup | None
    elements: int


def hops(
    kind: str, sizes: Mapping[str, int], elements: int, slice_devices: int, whole: WholeSlice | None
) -> Iterator[Hop]:
    """The hops of a collective over the axes of ``sizes``, major first: one, or two over an entire slice.

    ``elements``: those of the collective's operand or result on one device, the larger.

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
