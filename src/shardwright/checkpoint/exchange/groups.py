"""The units of a tensor in groups: those of a group are needed by the same processes, each of which needs a part of each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import add

import numpy as np

from shardwright.checkpoint.exchange.links import Links, Wanted, near
from shardwright.checkpoint.exchange.units import Units, units_of
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Units that the same wants have a part of.

    ``wants``: int64 (wants,), ascending; ``processes``: int64 (processes,), all of theirs, ascending; ``column``: int64
    (processes,), the place in ``wants`` of what each needs. ``units``: int64 (units,), ascending. ``sizes``: int64 (rows, wants),
    how many elements of a unit each want has; ``row``: int64 (units,), the row of each unit.
    """

    wants: np.ndarray
    processes: np.ndarray
    column: np.ndarray
    units: np.ndarray
    row: np.ndarray
    sizes: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Needs:
    """Who needs a part of which units. ``groups``: in the order of the first unit of each."""

    units: Units
    wanted: Wanted
    links: Links
    groups: tuple[Group, ...]

    def parts(self) -> Callable[[int, int], tuple[Box, ...]]:
        """A function: the parts of a unit that a want has, by their numbers."""
        links, wanted, units = self.links, self.wanted, self.units
        wants = wanted.want[links.wanted]

        @cache
        def inside(kind: int, want: int) -> list[tuple[list[int], list[int]]]:
            """The corners of the parts, counted from the start of any unit of a kind."""
            unit = int(np.argmax(links.kind == kind))
            first, last = np.searchsorted(links.of, [kind, kind + 1]).tolist()
            rows = links.wanted[first:last][wants[first:last] == want]
            low = np.maximum(wanted.starts[rows], units.starts[unit]) - units.starts[unit]
            high = np.minimum(wanted.stops[rows], units.stops[unit]) - units.starts[unit]
            return list(zip(low.tolist(), high.tolist(), strict=True))

        def parts(unit: int, want: int) -> tuple[Box, ...]:
            start = units.starts[unit].tolist()
            return tuple(
                Box(tuple(map(add, start, low)), tuple(map(add, start, high)))
                for low, high in inside(int(links.kind[unit]), want)
            )

        return parts


def needs_of(stored: Stored, wants: Sequence[Want], process: int | None = None) -> Needs:
    """Who needs a part of which units of a tensor.

    With ``process``, at least the groups that are linked to it by common processes, directly or through others. What this process
    does follows from them alone.
    """
    wanted = Wanted.of(wants, stored.starts.shape[1])
    numbers = np.arange(len(stored.starts))
    own = None if process is None else want_of(wants, process)
    found = None if own is None else near(stored, wanted, own)
    if found is not None:
        numbers, linked = found
        wanted = wanted.of_wants(linked)
    count = np.array([len(want.processes) for want in wants], np.int64)
    links = Links.between(stored.starts[numbers], stored.stops[numbers], wanted)
    kind, want, _ = _by_want(links, wanted)
    processes = np.zeros(int(links.kind.max(initial=-1)) + 1, np.int64)
    np.add.at(processes, kind, count[want])
    needing = processes[links.kind]
    units = units_of(stored, numbers[needing > 0], needing[needing > 0] == 1)
    links = Links.between(units.starts, units.stops, wanted)
    return Needs(units, wanted, links, tuple(_groups(links, wanted, wants)))


def want_of(wants: Sequence[Want], process: int) -> int | None:
    """The number of the want of a process."""
    return next((number for number, want in enumerate(wants) if process in want.processes), None)


def _by_want(links: Links, wanted: Wanted) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The wants of each kind: kind, want and how many elements the want has of it, int64 (pairs,) each."""
    kind, want = links.of, wanted.want[links.wanted]
    first = np.flatnonzero(np.diff(kind, prepend=-1) | np.diff(want, prepend=-1))
    sizes = np.add.reduceat(links.size, first) if len(first) else links.size
    return kind[first], want[first], sizes


def _groups(links: Links, wanted: Wanted, wants: Sequence[Want]) -> Iterable[Group]:
    kind, want, size = _by_want(links, wanted)
    num_kinds = int(links.kind.max(initial=-1)) + 1
    ends = np.searchsorted(kind, np.arange(num_kinds + 1)).tolist()
    same: dict[bytes, list[int]] = {}
    for number in range(num_kinds):
        if ends[number] < ends[number + 1]:
            same.setdefault(want[ends[number] : ends[number + 1]].tobytes(), []).append(number)
    by_kind = np.argsort(links.kind, kind="stable")
    first = np.searchsorted(links.kind[by_kind], np.arange(num_kinds + 1)).tolist()
    for key, numbers in same.items():
        of = np.frombuffer(key, np.int64)
        processes = np.concatenate([wants[one].processes for one in of.tolist()])
        column = np.repeat(np.arange(len(of)), [len(wants[one].processes) for one in of.tolist()])
        order = np.argsort(processes)
        units = np.concatenate([by_kind[first[one] : first[one + 1]] for one in numbers])
        row = np.repeat(np.arange(len(numbers)), [first[one + 1] - first[one] for one in numbers])
        ascending = np.argsort(units)
        yield Group(
            wants=of,
            processes=processes[order],
            column=column[order],
            units=units[ascending],
            row=row[ascending],
            sizes=np.stack([size[ends[one] : ends[one + 1]] for one in numbers]),
        )
