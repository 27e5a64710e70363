"""The schedules of all processes are those of a plain program that goes through every unit, step and parcel of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.checkpoint.exchange import links, rings, units
from shardwright.checkpoint.exchange import schedule as schedules
from shardwright.checkpoint.exchange.links import Links, Wanted, kinds
from shardwright.checkpoint.exchange.schedule import Parcel, Schedule, schedule_of
from shardwright.checkpoint.exchange.units import unit_boxes
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import random_partition
from tests.checkpoint.test_schedule import assert_right, random_wants, rounds_of, stored_of

Parts = tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Plain:
    """What a process does. ``sends`` and ``arrivals``: round, the other process and the parts, in their order; ``reads``: the
    units that it sends."""

    alone: list[Parts] = field(default_factory=list)
    sends: list[tuple[int, int, Parts]] = field(default_factory=list)
    arrivals: list[tuple[int, int, Parts]] = field(default_factory=list)
    reads: set[Box] = field(default_factory=set)


def plain_of(found: Schedule) -> Plain:
    sends = [
        (number, parcel.process, parcel.parts)
        for number, each in enumerate(rounds_of(found))
        for send in each.sends
        for parcel in send.parcels
    ]
    arrivals = [
        (number, one.process, one.parts) for number, each in enumerate(rounds_of(found)) for one in each.arrivals
    ]
    reads = {send.unit for each in rounds_of(found) for send in each.sends}
    return Plain(list(found.alone), sends, arrivals, reads)


def parts_of(unit: Box, boxes: Sequence[Box]) -> Parts:
    return tuple(common for box in sorted(set(boxes)) if (common := unit.intersect(box)) is not None)


def plain_schedules(boxes: Sequence[Box], needed: Mapping[int, Sequence[Box]], width: int, seed: int) -> list[Plain]:
    """The rule, one unit, one step and one parcel after the other. ``boxes``: the stored ones in their order."""
    found = [Plain() for _ in needed]
    groups: dict[tuple[int, ...], list[tuple[int, Box]]] = {}
    for number, box in enumerate(boxes):
        who = [process for process in needed if parts_of(box, needed[process])]
        for unit in [box] if len(who) == 1 else unit_boxes(box, width, 16):
            group = tuple(process for process in needed if parts_of(unit, needed[process]))
            if group:
                groups.setdefault(group, []).append((number, unit))
    read = dict.fromkeys(needed, 0)
    filled: dict[tuple[int, int], int] = {}
    for group, numbered in groups.items():
        count = len(group)
        turn = (seed + numbered[0][0]) % count
        ring = sorted(
            group, key=lambda one, group=group, turn=turn: (read[one], (group.index(one) - turn) % len(group))
        )
        ordered = sorted((unit for _, unit in numbered), key=lambda unit: -unit.size)
        for at, unit in enumerate(ordered):
            read[ring[at % count]] += unit.size * width
        if count == 1:
            continue
        sizes = [
            max(
                sum(part.size for part in parts_of(unit, needed[one])) * width
                for unit in ordered[at : at + count]
                for one in group
            )
            for at in range(0, len(ordered), count)
        ]
        # Of each round: the unit, the giver and the taker of each parcel.
        rounds: list[list[tuple[Box, int, int]]] = []
        bytes_of: list[int] = []
        for number, size in enumerate(sizes):
            for step in range(count - 1):
                if not rounds or bytes_of[-1] + size > rings.ROUND_BYTES:
                    rounds.append([])
                    bytes_of.append(0)
                turn = ordered[number * count : (number + 1) * count]
                rounds[-1] += [(unit, ring[place], ring[(place + step + 1) % count]) for place, unit in enumerate(turn)]
                bytes_of[-1] += size
        if len({tuple(sorted(set(needed[one]))) for one in group}) == 1 and len(ordered) < count:
            passed = relays([(unit, parts_of(unit, needed[group[0]])) for unit in ordered], ring, width)
            if len(passed) < len(rounds):
                rounds, bytes_of = [moves for moves, _ in passed], [num_bytes for _, num_bytes in passed]
        first = 0
        while any(
            filled.get((one, first + number), 0) and filled[one, first + number] + size > rings.ROUND_BYTES
            for number, size in enumerate(bytes_of)
            for one in group
        ):
            first += 1
        for number, moves in enumerate(rounds, first):
            for one in group:
                filled[one, number] = filled.get((one, number), 0) + bytes_of[number - first]
            for unit, giver, taker in moves:
                parts = parts_of(unit, needed[taker])
                found[giver].sends.append((number, taker, parts))
                found[taker].arrivals.append((number, giver, parts))
                found[giver].reads.add(unit)
    for process, boxes_here in needed.items():
        alone = sorted(unit for (one, *more), each in groups.items() if not more and one == process for _, unit in each)
        found[process].alone.extend(parts_of(unit, boxes_here) for unit in alone)
    return found


def relays(
    ordered: Sequence[tuple[Box, Parts]], ring: Sequence[int], width: int
) -> list[tuple[list[tuple[Box, int, int]], int]]:
    """The parcels of each round, and the most bytes of one process, where all that have a unit send it on."""
    rounds: list[tuple[list[tuple[Box, int, int]], int]] = []
    for number, (unit, parts) in enumerate(ordered):
        size = sum(part.size for part in parts) * width
        waiting = [*ring[number:], *ring[:number]]
        have = [waiting.pop(0)]
        while waiting:
            each = min(max(1, rings.ROUND_BYTES // size), -(-len(waiting) // len(have)))
            takers = {giver: waiting[place * each : (place + 1) * each] for place, giver in enumerate(have)}
            rounds.append(([(unit, giver, taker) for giver, some in takers.items() for taker in some], each * size))
            got = [taker for some in takers.values() for taker in some]
            have, waiting = [*have, *got], waiting[len(got) :]
    return rounds


def by_round(moves: Sequence[tuple[int, int, Parts]]) -> Mapping[tuple[int, int], list[Parts]]:
    """The parts of each round and other end, in their order."""
    found: dict[tuple[int, int], list[Parts]] = {}
    for number, process, parts in moves:
        found.setdefault((number, process), []).append(parts)
    return found


@settings(max_examples=150)
@given(
    shape=st.lists(st.integers(1, 9), max_size=3),
    splits=st.integers(0, 9),
    count=st.integers(2, 7),
    seed=st.integers(0, 1 << 32),
    unit_bytes=st.sampled_from([1, 16, 60, 1 << 20]),
    round_bytes=st.sampled_from([1, 40, 200, 1 << 20]),
    near=st.sampled_from([0, 3, 200]),
)
def test_every_process_finds_its_part_of_the_plain_schedule(
    shape: list[int], splits: int, count: int, seed: int, unit_bytes: int, round_bytes: int, near: int
) -> None:
    rng, whole = np.random.default_rng(seed), Box.whole(shape)
    boxes = sorted(random_partition(rng, whole, splits))
    needed = random_wants(rng, shape, count)
    stored = stored_of(boxes, len(shape))
    wants = wants_of((process, box) for process, own in needed.items() for box in own)
    with (
        patch.object(units, "UNIT_BYTES", unit_bytes),
        patch.object(rings, "ROUND_BYTES", round_bytes),
        patch.object(links, "MOST_NEAR", near),
    ):
        found = [schedule_of(stored, wants, process, seed) for process in range(count)]
        expected = plain_schedules(boxes, needed, stored.width, seed)
        for process, (one, plain) in enumerate(zip(map(plain_of, found), expected, strict=True)):
            assert sorted(one.alone) == sorted(plain.alone), process
            assert by_round(one.sends) == by_round(plain.sends), process
            assert by_round(one.arrivals) == by_round(plain.arrivals), process
            assert one.reads == plain.reads, process
        assert_right(found, needed, whole, stored.width)


def test_a_process_computes_its_own_parcels_and_no_others() -> None:
    """As many processes as boxes, each of which needs all of them: a million parcels, two thousand of them at one process."""
    count = 1000
    stored = stored_of([Box((row, 0), (row + 1, 4)) for row in range(count)], 2)
    wants = wants_of((process, Box((0, 0), (count, 4))) for process in range(count))
    made: list[Parcel] = []

    def counted(*arguments: Any) -> Parcel:
        made.append(Parcel(*arguments))
        return made[-1]

    with patch.object(schedules, "Parcel", counted), patch.object(rings, "ROUND_BYTES", 160):
        found = schedule_of(stored, wants, 77, 5)
        assert made == []
        assert found.num_rounds == -(-(count - 1) // 10)
        one = found.round(3)
        assert len(made) == len(one.sends[0].parcels) + len(one.arrivals) == 20
        rest = [found.round(number) for number in range(found.num_rounds) if number != 3]
    assert len(made) == 2 * (count - 1)
    assert {parcel.process for each in (one, *rest) for parcel in each.arrivals} == {*range(count)} - {77}


@pytest.mark.parametrize(
    ("count", "room", "units", "num_rounds"),
    [(3, 1, 1, 2), (5, 1, 1, 3), (11, 2, 1, 3), (12, 3, 1, 2), (30, 4, 1, 3), (12, 1, 2, 8), (9, 1, 1, 4)],
)
def test_who_has_a_unit_relays_it(count: int, room: int, units: int, num_rounds: int) -> None:
    """``room``: parcels of a round; ``units``: how many there are, one relayed after the other."""
    whole = Box((0, 0), (units, 4))
    rows = [Box((row, 0), (row + 1, 4)) for row in range(units)]
    stored, wants = stored_of(rows, 2), wants_of((process, whole) for process in range(count))
    with patch.object(rings, "ROUND_BYTES", room * 16):
        found = [schedule_of(stored, wants, process, 5) for process in range(count)]
        assert assert_right(found, {process: [whole] for process in range(count)}, whole, 4) == units * (count - 1)
    assert {one.num_rounds for one in found} == {num_rounds}


def test_what_thousands_need_is_relayed() -> None:
    """A norm of 1.6 MB: one sender would need 410 rounds."""
    count, whole = 4096, Box((0, 0), (58, 7168))
    stored, wants = stored_of([whole], 2, piece_bytes=1 << 20), wants_of((process, whole) for process in range(count))
    for process in (0, 77, 4095):
        found = schedule_of(stored, wants, process, 5)
        assert found.num_rounds == 4
        sent = [sum(parcel.num_bytes for send in each.sends for parcel in send.parcels) for each in rounds_of(found)]
        assert max(sent) <= rings.ROUND_BYTES
        assert sum(len(each.arrivals) for each in rounds_of(found)) == 1


def test_rows_and_columns_have_one_link_for_each_wanted_box() -> None:
    count = 2000
    rows = np.array([[row, 0] for row in range(count)]), np.array([[row + 1, count] for row in range(count)])
    columns = Wanted(rows[0][:, ::-1], rows[1][:, ::-1], np.arange(count))
    links = Links.between(*rows, columns)
    assert (links.kind == 0).all()
    assert links.wanted.tolist() == list(range(count))
    assert (links.size == 1).all()


@pytest.mark.parametrize("seed", range(3))
def test_boxes_of_one_kind_lie_to_all_wanted_boxes_in_the_same_way(seed: int) -> None:
    rng = np.random.default_rng(seed)
    same = 0
    for _ in range(40):
        dims, size = int(rng.integers(0, 4)), int(rng.integers(1, 30))
        starts, wanted = rng.integers(0, 6, (size, dims)), rng.integers(0, 6, (int(rng.integers(1, 5)), dims))
        stops, wanted_stops = starts + rng.integers(1, 4, starts.shape), wanted + rng.integers(1, 6, wanted.shape)
        kind, first = kinds(starts, stops, wanted, wanted_stops)
        assert kind[first].tolist() == list(range(len(first)))
        assert first.tolist() == sorted(first.tolist())
        for number in range(size):
            one = int(first[kind[number]])
            assert one <= number
            same += one < number
            assert (stops[number] - starts[number] == stops[one] - starts[one]).all()
            for low, high in zip(wanted, wanted_stops, strict=True):
                ends = [
                    (np.maximum(low, starts[at]) - starts[at], np.minimum(high, stops[at]) - starts[at])
                    for at in (one, number)
                ]
                empty = [(stop <= start).any() for start, stop in ends]
                assert empty[0] == empty[1]
                assert empty[0] or all((ends[0][end] == ends[1][end]).all() for end in (0, 1))
    assert same > 100
