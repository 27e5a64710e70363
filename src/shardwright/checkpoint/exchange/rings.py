"""In which order the processes of a group read its units and send them to each other, and in which rounds.

The processes stand in a ring. In turn ``t`` process ``p`` of the ring reads unit ``t * n + p``, where there are ``n`` processes.
In step ``s`` of the turn, each sends to the one that is ``s + 1`` places further: so in a step each process sends one parcel and
gets one, and after ``n - 1`` steps each has a part of every unit of the turn. Here ``n`` is 3:

| | process 0 | process 1 | process 2 |
|---|---|---|---|
| reads | unit 0 | unit 1 | unit 2 |
| step 0 | to 1, from 2 | to 2, from 0 | to 0, from 1 |
| step 1 | to 2, from 1 | to 0, from 2 | to 1, from 0 |

Steps that follow each other are one round, as many as ``ROUND_BYTES`` have room for. So a process computes what it does in a round from
its place in the ring: of a thousand processes that need a thousand units each sends and gets a thousand parcels, where all send a
million.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint.exchange.groups import Group, Needs

ROUND_BYTES = 16 << 20
"""So many bytes a process sends in a round, and gets, at most; a parcel that is longer has a round of its own."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps ``first`` to ``last`` of a turn, without ``last``. ``num_bytes``: of the longest parcel of the turn."""

    turn: int
    first: int
    last: int
    num_bytes: int

    @property
    def num_hops(self) -> int:
        return self.last - self.first

    def takers(self, count: int) -> np.ndarray:
        """The place to which each place of a ring of ``count`` sends in each step: int64 (steps, places)."""
        return (np.arange(count) + np.arange(self.first, self.last)[:, None] + 1) % count


@dataclass(frozen=True, slots=True)
class Relay:
    """A round of one unit, number ``unit`` in the order of the turns. Places are counted from its reader on, round the ring.

    The first ``holders`` places have the unit. Each of them sends it to ``each`` others: the first one to those that follow the
    holders, the second one to the next, until the end of the ring. ``num_bytes``: of a parcel.
    """

    unit: int
    holders: int
    each: int
    num_bytes: int

    @property
    def num_hops(self) -> int:
        return self.each

    def takers(self, count: int) -> np.ndarray:
        """The place to which each place of a ring of ``count`` sends each of its parcels: int64 (each, places); -1: to none."""
        places = (np.arange(count) - self.unit) % count
        takers = self.holders + places * self.each + np.arange(self.each)[:, None]
        return np.where((places < self.holders) & (takers < count), (takers + self.unit) % count, -1)


Moves = Sequence[Steps | Relay]
"""What is sent in one round."""


@dataclass(frozen=True, slots=True, eq=False)
class Ring:
    """The processes of a group in the order of their ring, and its units in the order of their turns.

    ``processes``: int64 (processes,); ``column``: int64 (processes,), the place in ``group.wants`` of what each needs. ``units``:
    int64 (units,), places in ``group.units``.
    """

    group: Group
    processes: np.ndarray
    column: np.ndarray
    units: np.ndarray

    @property
    def readers(self) -> np.ndarray:
        """The place in the ring of the reader of each unit, int64 (units,), in the order of ``units``."""
        return np.arange(len(self.units)) % len(self.processes)


def rings(needs: Needs, groups: Iterable[Group], width: int, seed: int) -> Iterator[Ring]:
    """The ring of each group. In one turn all units are about equally long, and who has read the least so far reads first.

    ``width``: bytes of an element. ``seed``: any number of the tensor, so that small ones have other readers.
    """
    num_bytes = (needs.units.stops - needs.units.starts).prod(axis=1) * width
    read: dict[int, int] = {}
    for group in groups:
        sizes, count = num_bytes[group.units], len(group.processes)
        units = np.argsort(-sizes, kind="stable")
        before = np.array([read.get(one, 0) for one in group.processes.tolist()], np.int64)
        turn = (seed + int(needs.units.number[group.units[0]])) % count
        order = np.lexsort(((np.arange(count) - turn) % count, before))
        ring = Ring(group, group.processes[order], group.column[order], units)
        reads = before[order]
        np.add.at(reads, ring.readers, sizes[units])
        read.update(zip(ring.processes.tolist(), reads.tolist(), strict=True))
        yield ring


def rounds_of(ring: Ring, width: int) -> tuple[Sequence[Moves], Sequence[int]]:
    """What is sent in each round of a ring, and how many bytes a process sends and gets at most in each. ``width``: bytes of an element."""
    found = _stepped(ring, width)
    if len(ring.group.wants) > 1 or len(ring.units) >= len(ring.processes):
        return found
    return min(found, _relayed(ring, width), key=lambda one: len(one[0]))


def _stepped(ring: Ring, width: int) -> tuple[Sequence[Moves], Sequence[int]]:
    """A step is counted with its longest parcel."""
    count = len(ring.processes)
    longest = _longest(ring, width)
    rounds: list[list[Steps]] = []
    filled: list[int] = []
    for turn, size in enumerate(np.maximum.reduceat(longest, np.arange(0, len(longest), count)).tolist()):
        step = 0
        while step < count - 1:
            room = (ROUND_BYTES - filled[-1]) // size if filled else 0
            if room <= 0:
                rounds.append([])
                filled.append(0)
                room = max(1, ROUND_BYTES // size)
            last = min(step + room, count - 1)
            rounds[-1].append(Steps(turn, step, last, size))
            filled[-1] += (last - step) * size
            step = last
    return rounds, filled


def _relayed(ring: Ring, width: int) -> tuple[Sequence[Moves], Sequence[int]]:
    """One unit after the other."""
    count = len(ring.processes)
    rounds: list[list[Relay]] = []
    filled: list[int] = []
    for unit, size in enumerate(_longest(ring, width).tolist()):
        holders = 1
        while holders < count:
            each = min(max(1, ROUND_BYTES // size), -(-(count - holders) // holders))
            rounds.append([Relay(unit, holders, each, size)])
            filled.append(each * size)
            holders = min(count, holders + holders * each)
    return rounds, filled


def _longest(ring: Ring, width: int) -> np.ndarray:
    """The bytes of the longest parcel of each unit, in the order of the turns."""
    return (ring.group.sizes.max(axis=1) * width)[ring.group.row[ring.units]]


class Calendar:
    """How many bytes the processes of each want send and get at most in each round so far."""

    def __init__(self) -> None:
        self._filled: dict[tuple[int, int], int] = {}

    def place(self, wants: Sequence[int], filled: Sequence[int]) -> int:
        """The first round from which on there is room for a group. ``filled``: its bytes in each of its rounds."""
        at = 0
        while not all(self._has_room(want, at + number, more) for number, more in enumerate(filled) for want in wants):
            at += 1
        for number, more in enumerate(filled):
            for want in wants:
                self._filled[want, at + number] = self._filled.get((want, at + number), 0) + more
        return at

    def _has_room(self, want: int, number: int, more: int) -> bool:
        filled = self._filled.get((want, number), 0)
        return filled == 0 or filled + more <= ROUND_BYTES
