"""Schedules of all processes for random boxes: each element is read by one process and gets to all that need it, within bounds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shardwright.checkpoint.exchange import links, rings, units
from shardwright.checkpoint.exchange.links import overlaps
from shardwright.checkpoint.exchange.schedule import Round, Schedule, schedule_of
from shardwright.checkpoint.exchange.units import unit_boxes
from shardwright.checkpoint.exchange.wants import Want, wants_of
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import random_partition


def stored_of(boxes: Sequence[Box], num_dims: int, width: int = 4, piece_bytes: int = 16) -> Stored:
    boxes = sorted(boxes)
    starts = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), num_dims)
    stops = np.array([box.stop for box in boxes], np.int64).reshape(len(boxes), num_dims)
    return Stored(starts, stops, width, piece_bytes)


def rounds_of(schedule: Schedule) -> Sequence[Round]:
    return [schedule.round(number) for number in range(schedule.num_rounds)]


def random_wants(rng: np.random.Generator, shape: Sequence[int], count: int) -> dict[int, list[Box]]:
    """Shards, replicas of shards, boxes that overlap, or nothing, for each of ``count`` processes."""
    kind, whole = rng.integers(4), Box.whole(shape)
    parts = random_partition(rng, whole, int(rng.integers(0, 6)))
    if kind == 0:
        return {process: [whole] for process in range(count)}
    if kind == 1:
        return {process: [parts[process % len(parts)]] for process in range(count)}
    found: dict[int, list[Box]] = {process: [] for process in range(count)}
    if kind == 2:
        for part in parts:
            found[int(rng.integers(count))].append(part)
        return found
    for process in range(count):
        for _ in range(int(rng.integers(0, 3))):
            start = [int(rng.integers(0, size)) for size in shape]
            stop = [int(rng.integers(at + 1, size + 1)) for at, size in zip(start, shape, strict=True)]
            found[process].append(Box(tuple(start), tuple(stop)))
    return found


def filled(whole: Box, boxes: Sequence[Box]) -> np.ndarray:
    """How many of the boxes have each element."""
    found = np.zeros(whole.shape, int)
    for box in boxes:
        found[(*box.slices, ...)] += 1
    return found


def assert_right(found: Sequence[Schedule], needed: dict[int, list[Box]], whole: Box, width: int) -> int:
    """Compares the schedules of all processes with what each needs, element by element. Returns how many parcels there are."""
    has: dict[int, list[Box]] = {
        process: [part for parts in one.alone for part in parts] for process, one in enumerate(found)
    }
    reads: list[np.ndarray] = []
    num_parcels = 0
    for process, one in enumerate(found):
        wanted = filled(whole, needed[process]) > 0
        reads += [filled(whole, parts) > 0 for parts in one.alone]
        seen: set[Box] = set()
        done: set[Box] = set()
        there: set[Box] = set()
        for number, each in enumerate(rounds_of(one)):
            sent = 0
            for send in each.sends:
                if send.relayed:
                    assert set(send.parts) <= there, "what is relayed has been read or has arrived before"
                else:
                    # A unit is read when it is first sent, and kept until its last round.
                    assert send.unit not in done
                    if send.unit not in seen:
                        reads.append(filled(whole, (*send.parts, *send.own)) > 0)
                        has[process] += send.own
                        there |= set(send.own)
                    seen.add(send.unit)
                    assert (filled(whole, send.parts) <= filled(whole, [send.unit])).all() or len(send.parts) > 1
                    assert wanted[(*send.unit.slices, ...)].any(), "who reads needs a part"
                    done |= {send.unit} if send.ends else set()
                for parcel in send.parcels:
                    assert parcel.process != process
                    assert set(parcel.parts) <= set(send.parts)
                    num_parcels += 1
                    sent += parcel.num_bytes
                    has[parcel.process] += parcel.parts
            got = sum(parcel.num_bytes for parcel in each.arrivals)
            most = rings.ROUND_BYTES
            assert sent <= most or sum(len(send.parcels) for send in each.sends) == 1
            assert got <= most or len(each.arrivals) == 1
            # Both ends have the same parcels in the same order.
            for other, theirs in enumerate(found):
                theirs_now = theirs.round(number).sends
                coming = [parcel for parcel in each.arrivals if parcel.process == other]
                going = [parcel for send in theirs_now for parcel in send.parcels if parcel.process == process]
                assert [parcel.parts for parcel in coming] == [parcel.parts for parcel in going]
                for parcel in (*coming, *going):
                    assert parcel.num_bytes == sum(part.size for part in parcel.parts) * width
            there |= {part for parcel in each.arrivals for part in parcel.parts}
        assert done == seen
    for process, boxes in needed.items():
        # Boxes that are equal are one; an element of two boxes may come with each.
        assert (filled(whole, has[process]) == filled(whole, list(dict.fromkeys(boxes)))).all(), process
    total = sum((one.astype(int) for one in reads), np.zeros(whole.shape, int))
    wanted = filled(whole, [box for boxes in needed.values() for box in boxes]) > 0
    assert (total == wanted).all(), "each element that anybody needs is read once, and no other"
    return num_parcels


@pytest.mark.parametrize("seed", range(6))
def test_each_element_is_read_once_and_gets_to_all_that_need_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    num_parcels = 0
    for _ in range(40):
        monkeypatch.setattr(units, "UNIT_BYTES", int(rng.choice([1, 16, 60, 1 << 20])))
        monkeypatch.setattr(rings, "ROUND_BYTES", int(rng.choice([1, 40, 200, 1 << 20])))
        monkeypatch.setattr(links, "CANDIDATES", int(rng.choice([1, 5, 1000])))
        monkeypatch.setattr(links, "MOST_NEAR", int(rng.choice([0, 3, 200])))
        whole = Box.whole(rng.integers(1, 9, int(rng.integers(0, 4))).tolist())
        count = int(rng.integers(2, 7))
        stored = stored_of(random_partition(rng, whole, int(rng.integers(0, 9))), len(whole.start))
        needed = random_wants(rng, whole.shape, count)
        wants = wants_of((process, box) for process, boxes in needed.items() for box in boxes)
        found = [schedule_of(stored, wants, process, seed) for process in range(count)]
        num_parcels += assert_right(found, needed, whole, stored.width)
    assert num_parcels > 200


def test_unlinked_processes_do_not_change_a_schedule() -> None:
    """Two groups of two replicas: the schedule of one group is the same with and without the other."""
    rows = [Box((at, 0), (at + 4, 8)) for at in range(0, 16, 4)]
    stored = stored_of(rows, 2)
    upper, lower = Box((0, 0), (8, 8)), Box((8, 0), (16, 8))
    wants = wants_of([(0, upper), (1, upper), (2, lower), (3, lower)])
    for process in range(4):
        own = tuple(want for want in wants if process in want.processes)
        found = [schedule_of(stored, each, process, 5) for each in (wants, own)]
        assert found[0].alone == found[1].alone
        assert rounds_of(found[0]) == rounds_of(found[1])


def test_same_boxes_send_nothing() -> None:
    boxes = [Box((0, at), (8, at + 2)) for at in range(0, 8, 2)]
    wants = wants_of(enumerate(boxes))
    for process, box in enumerate(boxes):
        found = schedule_of(stored_of(boxes, 2), wants, process, 0)
        assert (found.alone, found.num_rounds) == (((box,),), 0)


def test_replicas_share_the_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 32)
    monkeypatch.setattr(rings, "ROUND_BYTES", 64)
    whole = Box((0, 0), (64, 8))
    wants = wants_of((process, whole) for process in range(4))
    found = [schedule_of(stored_of([whole], 2), wants, process, 0) for process in range(4)]
    # 64 units of a row; of each, three parcels of 32 bytes. So 48 rounds of 64 bytes to each process, if all are full.
    read = [sum(send.ends for each in rounds_of(one) for send in each.sends) for one in found]
    assert read == [16] * 4
    # 24 would be enough, if two units in a round were never of the same process.
    assert max(one.num_rounds for one in found) <= 32


def test_a_load_of_columns_from_rows_has_as_few_rounds_as_its_bytes_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "UNIT_BYTES", 64)
    monkeypatch.setattr(rings, "ROUND_BYTES", 256)
    rows = [Box((at, 0), (at + 8, 16)) for at in range(0, 64, 8)]
    columns = [Box((0, at), (64, at + 2)) for at in range(0, 16, 2)]
    wants = wants_of(enumerate(columns))
    found = [schedule_of(stored_of(rows, 2), wants, process, 0) for process in range(8)]
    # Each process gets 7/8 of its 512 bytes.
    assert max(one.num_rounds for one in found) <= 4


def test_units_are_of_complete_pieces_and_about_as_long_as_asked() -> None:
    box = Box((3, 0, 0), (5, 7000, 96))
    pieces = 1 << 20
    found = list(unit_boxes(box, 4, pieces))
    assert (filled(Box.whole((5, 7000, 96)), found) == filled(Box.whole((5, 7000, 96)), [box])).all()
    assert max(unit.size * 4 for unit in found) <= units.UNIT_BYTES
    long = list(unit_boxes(Box((0, 0), (4096, 4096)), 4, pieces))
    assert [unit.size * 4 for unit in long] == [units.UNIT_BYTES] * 8
    odd = list(unit_boxes(Box((0, 0), (4096, 3 << 10)), 4, pieces))
    assert all(unit.size * 4 % pieces == 0 for unit in odd)


@pytest.mark.parametrize("seed", range(3))
def test_overlaps_are_those_of_all_pairs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(30):
        dims, size = int(rng.integers(0, 4)), int(rng.integers(1, 20))
        starts, others = rng.integers(0, 12, (2, size, dims))
        stops, other_stops = starts + rng.integers(1, 6, (size, dims)), others + rng.integers(1, 6, (size, dims))
        found = overlaps(starts, stops, others, other_stops)
        needed = {
            (one, other)
            for one in range(size)
            for other in range(size)
            if (starts[one] < other_stops[other]).all() and (stops[one] > others[other]).all()
        }
        assert len(found[0]) == len(needed)
        assert set(zip(*(each.tolist() for each in found), strict=True)) == needed


def test_wants_of_nobody() -> None:
    assert wants_of([]) == ()
    assert wants_of([(0, Box((0, 2), (4, 2)))]) == ()
    for wants in ((), (Want((Box((0,), (4,)),), (1,)),)):
        found = schedule_of(stored_of([Box((0,), (4,))], 1), wants, 0, 0)
        assert (found.alone, found.num_rounds) == ((), 0)
        assert found.round(0) == Round()
