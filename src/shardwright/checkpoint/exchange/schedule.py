"""What one process reads of a tensor, what it sends to whom in which round, and what it gets. Every process computes its own part.

All of it follows from the stored boxes and from what each process needs, so that the parts of all processes fit each other.

| a unit is needed by | what happens |
|---|---|
| one process | it reads for itself, in no round |
| two or more | one reads, and sends the others their parts in the steps of a ring, or some that relay it: ``rings.py`` |
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint.exchange.groups import Group, Needs, needs_of, want_of
from shardwright.checkpoint.exchange.rings import Calendar, Relay, Ring, Steps, rings, rounds_of
from shardwright.checkpoint.exchange.units import Units
from shardwright.checkpoint.exchange.wants import Want
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True)
class Parcel:
    """Parts of one unit that one process sends to another: ``process``, the other end. They follow each other in its bytes.

    ``hop``: in which hop of its move.
    """

    process: int
    parts: tuple[Box, ...]
    num_bytes: int
    hop: int


@dataclass(frozen=True, slots=True)
class Send:
    """What one round sends of a unit. ``parts``: all that others need of it, each once; ``own``: what the reader needs of it.

    ``ends``: this is the last round of the unit. ``relayed``: nothing is read, since this process has got ``own`` in an earlier round.
    """

    unit: Box
    parts: tuple[Box, ...]
    own: tuple[Box, ...]
    parcels: tuple[Parcel, ...]
    ends: bool
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Move:
    """What the processes of one ring send to each other in a round: in each hop, a process sends one parcel or none, and gets one or none.

    ``processes``: of the ring in its order; ``steps``: who sends to whom, by their places. ``send`` and ``arrivals``: of one process.
    """

    processes: tuple[int, ...]
    steps: Steps | Relay
    send: Send | None
    arrivals: tuple[Parcel, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """What one process does in a round, by ring: read and send, then take what arrives; each in this order."""

    moves: tuple[Move, ...] = ()

    @property
    def sends(self) -> list[Send]:
        return [move.send for move in self.moves if move.send is not None]

    @property
    def arrivals(self) -> list[Parcel]:
        return [parcel for move in self.moves for parcel in move.arrivals]

    def bytes_to(self, count: int) -> list[int]:
        """How many bytes this process sends to each of ``count``."""
        return _by_process((parcel for send in self.sends for parcel in send.parcels), count)

    def bytes_from(self, count: int) -> list[int]:
        """How many bytes each of ``count`` sends to this process."""
        return _by_process(self.arrivals, count)


def _by_process(parcels: Iterable[Parcel], count: int) -> list[int]:
    found = [0] * count
    for parcel in parcels:
        found[parcel.process] += parcel.num_bytes
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """The place of a process in a ring: ``here``. ``own``: the number of its want; ``parts``: of a unit and a want.

    ``processes``: of the ring in its order.
    """

    ring: Ring
    processes: tuple[int, ...]
    units: Units
    width: int
    parts: Callable[[int, int], tuple[Box, ...]]
    here: int
    own: int

    def move(self, steps: Steps | Relay) -> Move:
        """What this process sends and gets in some steps of a turn, in which it may have no unit, or of a unit that is relayed."""
        if isinstance(steps, Relay):
            send, arrivals = self._relays(steps), self._relayed(steps)
        else:
            send, arrivals = self._sends(steps), self._arrivals(steps)
        return Move(self.processes, steps, send, arrivals)

    def _sends(self, steps: Steps) -> Send | None:
        unit = self._unit(steps.turn, self.here)
        if unit is None:
            return None
        ring, count = self.ring, len(self.ring.processes)
        # A want of this process alone is nobody's parcel.
        others = dict.fromkeys(sorted([*ring.column[: self.here].tolist(), *ring.column[self.here + 1 :].tolist()]))
        parts = {column: self.parts(unit, int(ring.group.wants[column])) for column in others}
        places = [(self.here + step + 1) % count for step in range(steps.first, steps.last)]
        parcels = [
            Parcel(process, parts[column], self._num_bytes(parts[column]), hop)
            for hop, (process, column) in enumerate(
                zip(ring.processes[places].tolist(), ring.column[places].tolist(), strict=True)
            )
        ]
        found = dict.fromkeys(part for each in parts.values() for part in each)
        own, ends = self.parts(unit, self.own), steps.last == count - 1
        return Send(self.units.box(unit), tuple(found), own, tuple(parcels), ends)

    def _arrivals(self, steps: Steps) -> tuple[Parcel, ...]:
        parcels: list[Parcel] = []
        for hop, step in enumerate(range(steps.first, steps.last)):
            giver = (self.here - step - 1) % len(self.ring.processes)
            unit = self._unit(steps.turn, giver)
            if unit is not None:
                parts = self.parts(unit, self.own)
                parcels.append(Parcel(int(self.ring.processes[giver]), parts, self._num_bytes(parts), hop))
        return tuple(parcels)

    def _relays(self, relay: Relay) -> Send | None:
        place, count = self._place(relay), len(self.ring.processes)
        first = relay.holders + place * relay.each
        if place >= relay.holders or first >= count:
            return None
        unit = self._number(relay.unit)
        parts = self.parts(unit, self.own)
        to = [self._process(relay, other) for other in range(first, min(first + relay.each, count))]
        parcels = tuple(Parcel(process, parts, self._num_bytes(parts), hop) for hop, process in enumerate(to))
        # From the second round on the reader too has the unit in its place.
        return Send(self.units.box(unit), parts, parts, parcels, ends=True, relayed=relay.holders > 1)

    def _relayed(self, relay: Relay) -> tuple[Parcel, ...]:
        place = self._place(relay) - relay.holders
        if not 0 <= place < relay.holders * relay.each:
            return ()
        parts = self.parts(self._number(relay.unit), self.own)
        giver, hop = divmod(place, relay.each)
        return (Parcel(self._process(relay, giver), parts, self._num_bytes(parts), hop),)

    def _place(self, relay: Relay) -> int:
        """The place of this process, counted from the reader of a unit that is relayed."""
        return (self.here - relay.unit) % len(self.ring.processes)

    def _process(self, relay: Relay, place: int) -> int:
        return int(self.ring.processes[(relay.unit + place) % len(self.ring.processes)])

    def _unit(self, turn: int, place: int) -> int | None:
        """The unit that the process at a place of the ring reads in a turn."""
        at = turn * len(self.ring.processes) + place
        return self._number(at) if at < len(self.ring.units) else None

    def _number(self, at: int) -> int:
        """The number of a unit, by its place in the order of the turns."""
        return int(self.ring.group.units[self.ring.units[at]])

    def _num_bytes(self, parts: Sequence[Box]) -> int:
        return sum(part.size for part in parts) * self.width


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What one process does for one tensor. ``alone``: what only it needs, of each unit. Its rounds are the first ones of all.

    ``steps``: of each round the steps in which it takes part, with its places in their rings. A load of many gigabytes has
    hundreds of thousands of parcels: those of a round are made when they are asked for.
    """

    alone: tuple[tuple[Box, ...], ...] = ()
    steps: Sequence[Sequence[tuple[Seat, Steps | Relay]]] = ()

    @property
    def num_rounds(self) -> int:
        return len(self.steps)

    def round(self, number: int) -> Round:
        """A round, by its number; one in which this process does nothing after the last of its own."""
        return (
            Round(tuple(seat.move(steps) for seat, steps in self.steps[number]))
            if number < len(self.steps)
            else Round()
        )


def seed_of(name: str) -> int:
    """The seed of a tensor, the same in every process."""
    return zlib.crc32(name.encode())


class KeptNeeds:
    """As ``needs_of``, which is not computed again for the next tensor with the same boxes, as a weight's and its moments' are."""

    def __init__(self) -> None:
        self._stored: Stored | None = None
        self._wants: Sequence[Want] = ()
        self._needs: Needs | None = None

    def __call__(self, stored: Stored, wants: Sequence[Want], process: int) -> Needs:
        if self._needs is None or self._wants is not wants or self._stored is None or not _same(self._stored, stored):
            self._stored, self._wants, self._needs = stored, wants, needs_of(stored, wants, process)
        return self._needs


def _same(one: Stored, other: Stored) -> bool:
    return (
        (one.width, one.piece_bytes) == (other.width, other.piece_bytes)
        and np.array_equal(one.starts, other.starts)
        and np.array_equal(one.stops, other.stops)
    )


def schedule_of(
    stored: Stored,
    wants: Sequence[Want],
    process: int,
    seed: int,
    needs_of: Callable[[Stored, Sequence[Want], int], Needs] = needs_of,
) -> Schedule:
    """The schedule of one process. ``seed``: any number of the tensor, so that small ones have other readers."""
    own = want_of(wants, process)
    if own is None:
        return Schedule()
    needs = needs_of(stored, wants, process)
    parts, calendar = needs.parts(), Calendar()
    alone: list[int] = []
    rounds: list[list[tuple[Seat, Steps | Relay]]] = []
    for ring in rings(needs, _linked(needs.groups, own), stored.width, seed):
        group = ring.group
        if len(ring.processes) == 1:
            alone += group.units.tolist() if group.wants[0] == own else []
            continue
        steps, filled = rounds_of(ring, stored.width)
        first = calendar.place(group.wants.tolist(), filled)
        if own not in group.wants:
            continue
        processes = tuple(ring.processes.tolist())
        seat = Seat(ring, processes, needs.units, stored.width, parts, processes.index(process), own)
        rounds += [[] for _ in range(first + len(steps) - len(rounds))]
        for number, some in enumerate(steps, first):
            rounds[number] += [(seat, one) for one in some]
    return Schedule(tuple(parts(unit, own) for unit in sorted(alone)), rounds)


def _linked(groups: Sequence[Group], own: int) -> Sequence[Group]:
    """The groups that are linked to a want by common wants, directly or through others, in the same order."""
    of_want: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for want in group.wants.tolist():
            of_want.setdefault(want, []).append(number)
    waiting, seen, found = [own], {own}, set[int]()
    while waiting:
        new = set(of_want.get(waiting.pop(), ())) - found
        found |= new
        wants = {want for number in new for want in groups[number].wants.tolist()} - seen
        seen |= wants
        waiting += wants
    return [groups[number] for number in sorted(found)]
