"""Who reads each unit of a tensor, and in which round it is passed on. Every process computes it alike, from the same numbers.

Of the processes that need a part of a unit, the one that has read the least so far reads it. It sends to each of the others the
elements that this one needs. In a round a process sends at most ``ROUND_BYTES`` and gets as many: so memory is bounded. A unit that
many processes need is sent in several rounds, and is kept for so long.

| a unit is needed by | what happens |
|---|---|
| one process | it reads for itself, in no round |
| two or more | one reads, and sends the others their parts in the first rounds that have room at both ends |
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from shardwright.checkpoint.exchange.units import Unit, units_of
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box

ROUND_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Parcel:
    """Parts of one unit that one process sends to another: ``process``, the other end. They follow each other in its bytes."""

    process: int
    parts: tuple[Box, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Send:
    """What one round sends of a unit. ``parts``: all that others need of it, each once; ``own``: what the reader needs of it.

    ``ends``: this is the last round of the unit.
    """

    unit: Box
    parts: tuple[Box, ...]
    own: tuple[Box, ...]
    parcels: tuple[Parcel, ...]
    ends: bool


@dataclass(frozen=True, slots=True)
class Round:
    """What one process does in a round: read and send, then take what arrives; each in this order."""

    sends: list[Send] = field(default_factory=list)
    arrivals: list[Parcel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one process does for one tensor. ``alone``: what only it needs, of each unit. Its rounds are the first ones of all."""

    alone: tuple[tuple[Box, ...], ...]
    rounds: tuple[Round, ...]


def readers(stored: Stored, wants: Sequence[Want], seed: int, process: int | None = None) -> Iterator[tuple[Unit, int]]:
    """Each unit with the process that reads it. ``seed``: any number of the tensor, so that small ones have other readers.

    With ``process``, the units of ``units_of``.
    """
    read: dict[int, int] = {}
    for unit in units_of(stored, wants, process):
        needing = sorted(one for want, _ in unit.needs for one in want.processes)
        turn = (seed + unit.number + unit.index) % len(needing)
        reader = min((*needing[turn:], *needing[:turn]), key=lambda one: read.get(one, 0))
        read[reader] = read.get(reader, 0) + unit.box.size * stored.width
        yield unit, reader


def seed_of(name: str) -> int:
    """The seed of a tensor, the same in every process."""
    return zlib.crc32(name.encode())


def schedule_of(stored: Stored, wants: Sequence[Want], process: int, seed: int) -> Schedule:
    """The schedule of one process. It is a part of the schedule of all, whatever other processes are not linked to it."""
    alone: list[tuple[Box, ...]] = []
    rounds: list[Round] = []
    load = _Load()
    for unit, reader in readers(stored, wants, seed, process):
        parcels = [
            Parcel(one, parts, sum(part.size for part in parts) * stored.width)
            for want, parts in unit.needs
            for one in want.processes
            if one != reader
        ]
        if not parcels:
            if reader == process:
                alone.append(unit.needs[0][1])
            continue
        # Beginning after the reader, so that readers of one time send to different processes.
        parcels.sort(key=lambda one: (one.process < reader, one.process))
        groups = list(_groups(parcels))
        for number, group in enumerate(groups):
            at = load.place(reader, group)
            rounds += [Round() for _ in range(at + 1 - len(rounds))]
            if reader == process:
                parts = dict.fromkeys(part for parcel in parcels for part in parcel.parts)
                own = next(parts for want, parts in unit.needs if reader in want.processes)
                ends = number == len(groups) - 1
                rounds[at].sends.append(Send(unit.box, tuple(parts), own, tuple(group), ends))
            rounds[at].arrivals.extend(
                Parcel(reader, one.parts, one.num_bytes) for one in group if one.process == process
            )
    while rounds and not (rounds[-1].sends or rounds[-1].arrivals):
        rounds.pop()
    return Schedule(tuple(alone), tuple(rounds))


def _groups(parcels: Iterable[Parcel]) -> Iterator[Sequence[Parcel]]:
    """Parcels of one reader, as many at a time as a round has room for."""
    group: list[Parcel] = []
    num_bytes = 0
    for parcel in parcels:
        if group and num_bytes + parcel.num_bytes > ROUND_BYTES:
            yield group
            group, num_bytes = [], 0
        group.append(parcel)
        num_bytes += parcel.num_bytes
    yield group


class _Load:
    """What each process sends and gets in each round so far, the last round in which it sends, and the first one in which it has
    room to get more."""

    def __init__(self) -> None:
        self._sent: dict[tuple[int, int], int] = {}
        self._got: dict[tuple[int, int], int] = {}
        self._last: dict[int, int] = {}
        self._full: dict[int, int] = {}

    def place(self, reader: int, group: Sequence[Parcel]) -> int:
        """The first round with room for a group of parcels at all its ends, and not before what the reader has sent already.

        So a reader has one unit after the other in memory.
        """
        total = sum(parcel.num_bytes for parcel in group)
        at = max(self._last.get(reader, 0), *(self._full.get(one.process, 0) for one in group))
        while not (
            _has_room(self._sent.get((reader, at), 0), total)
            and all(_has_room(self._got.get((one.process, at), 0), one.num_bytes) for one in group)
        ):
            at += 1
        self._last[reader] = at
        self._sent[reader, at] = self._sent.get((reader, at), 0) + total
        for one in group:
            self._got[one.process, at] = self._got.get((one.process, at), 0) + one.num_bytes
            full = self._full.get(one.process, 0)
            while self._got.get((one.process, full), 0) >= ROUND_BYTES:
                full += 1
            self._full[one.process] = full
        return at


def _has_room(num_bytes: int, more: int) -> bool:
    return num_bytes == 0 or num_bytes + more <= ROUND_BYTES
