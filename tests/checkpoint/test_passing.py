"""Random boxes of a checkpoint, read by several processes together: bit for bit, each piece once, and all end where one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import Checkpoint, CheckpointError, DamagedError, open_checkpoint
from shardwright.checkpoint.exchange import rings, schedule, units
from shardwright.checkpoint.exchange.loads import load_of
from shardwright.checkpoint.exchange.passing import Together, read_together, together_or_alone
from shardwright.checkpoint.exchange.schedule import KeptNeeds, Round, schedule_of, seed_of
from shardwright.checkpoint.exchange.wants import wants_of
from shardwright.checkpoint.reading import streams
from shardwright.core.boxes.box import Box
from tests.checkpoint.editing import flip
from tests.checkpoint.states import same_bits
from tests.checkpoint.test_schedule import random_wants, rounds_of, stored_of
from tests.checkpoint.test_streams import Recorded, Saved, random_saved

WAIT_S = 20


class Meeting:
    """Threads that stand for processes: each gives a value, and gets those of all."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count)

    def gather(self, index: int, value: Any) -> list[Any]:
        self._values[index] = value
        self._barrier.wait(WAIT_S)
        found = list(self._values)
        self._barrier.wait(WAIT_S)
        return found


@dataclass(frozen=True, slots=True)
class ThreadCarrier:
    index: int
    meeting: Meeting
    noun: str = "process"

    @property
    def count(self) -> int:
        return self.meeting.count

    def largest(self, number: int) -> int:
        return max(self.meeting.gather(self.index, number))

    def texts(self, text: str) -> Sequence[str]:
        return self.meeting.gather(self.index, text)

    def exchange(self, now: Round, sent: np.ndarray) -> np.ndarray:
        to, sent_here = now.bytes_to(self.count), now.bytes_from(self.count)
        assert len(sent) == sum(to)
        parts = [
            data[sum(sizes[: self.index]) :][: sizes[self.index]]
            for data, sizes in self.meeting.gather(self.index, (sent, to))
        ]
        assert [len(part) for part in parts] == sent_here
        return np.concatenate(parts)


def by_all(count: int, do: Callable[[ThreadCarrier], Any]) -> list[Any]:
    """The result or the error of each process."""
    meeting = Meeting(count)
    found: list[Any] = [None] * count

    def one(index: int) -> None:
        try:
            found[index] = do(ThreadCarrier(index, meeting))
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=one, args=(index,), name=str(index)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return found


def together(saved: Saved, needed: dict[int, list[Box]], sources: dict[int, Any] | None = None) -> list[Any]:
    wants = wants_of((process, box) for process, boxes in needed.items() for box in boxes)
    return by_all(
        len(needed),
        lambda carrier: read_together(
            (sources or {}).get(carrier.index) or open_checkpoint(saved.directory),
            "w",
            list(dict.fromkeys(needed[carrier.index])),
            wants,
            carrier,
        ),
    )


@pytest.mark.parametrize("seed", range(5))
def test_several_processes_read_each_piece_once(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(streams, "open_regular", Recorded)
    damaged = 0
    for number in range(6):
        saved = random_saved(rng, tmp_path / str(number))
        for _ in range(3):
            small = rng.integers(2)
            monkeypatch.setattr(units, "UNIT_BYTES", 24 if small else 1 << 20)
            monkeypatch.setattr(rings, "ROUND_BYTES", int(rng.choice([1, 50, 1 << 20])))
            count = int(rng.integers(2, 5))
            needed = random_wants(rng, saved.array.shape, count)
            least = saved.needed([box for boxes in needed.values() for box in boxes])
            Recorded.counts = {name: np.zeros_like(counts) for name, counts in least.items()}
            found = together(saved, needed)
            for process, arrays in enumerate(found):
                assert not isinstance(arrays, Exception), arrays
                for box, array in zip(dict.fromkeys(needed[process]), arrays, strict=True):
                    assert same_bits(array, saved.array[box.slices])
            read = sum(counts.sum() for counts in Recorded.counts.values())
            wants = wants_of((process, box) for process, boxes in needed.items() for box in boxes)
            checkpoint = open_checkpoint(saved.directory)
            load = load_of(checkpoint, {"w": wants}, count)
            assert load.bytes_read == read
            schedules = [schedule_of(checkpoint.stored("w"), wants, process, seed_of("w")) for process in range(count)]
            sent = [
                parcel for one in schedules for each in rounds_of(one) for send in each.sends for parcel in send.parcels
            ]
            assert load.bytes_passed_on == sum(parcel.num_bytes for parcel in sent)
            if small:
                # A piece in two units may be read by two processes.
                assert all(((Recorded.counts[name] > 0) == (counts > 0)).all() for name, counts in least.items())
            else:
                assert all((Recorded.counts[name] == counts).all() for name, counts in least.items())
            file, offset, box = saved.stored[int(rng.integers(len(saved.stored)))]
            byte = offset + int(rng.integers(box.size * saved.array.dtype.itemsize))
            if least[file][byte]:
                flip(saved.directory / file, byte, 3)
                errors = together(saved, needed)
                assert all(type(error) is DamagedError for error in errors), errors
                assert len({str(error) for error in errors}) == 1
                assert f"{file}: tensor 'w', box " in str(errors[0])
                flip(saved.directory / file, byte, 3)
                damaged += 1
    assert damaged > 3


def test_a_unit_that_several_have_is_relayed_from_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process needs all stored boxes but one, which so is a unit that four processes need, in two rounds."""
    monkeypatch.setattr(rings, "ROUND_BYTES", 1)
    rng = np.random.default_rng(0)
    checked = 0
    while checked < 3:
        saved = random_saved(rng, tmp_path / str(rng.integers(1 << 30)))
        *others, last = sorted(box for _, _, box in saved.stored)
        if not others or not any(last.start):
            continue
        whole = Box.whole(saved.array.shape)
        found = together(saved, {**{process: [whole] for process in range(4)}, 4: others})
        for arrays in found[:4]:
            assert not isinstance(arrays, Exception), arrays
            assert same_bits(arrays[0], saved.array)
        checked += 1


class Failing:
    """A checkpoint that one process cannot read."""

    def __init__(self, checkpoint: Checkpoint, error: Exception) -> None:
        self.directory, self.tensors, self.stored = checkpoint.directory, checkpoint.tensors, checkpoint.stored
        self._error = error

    def read_into(self, *_: Any) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "others"),
    [
        (
            CheckpointError("w: cannot be read: no permission.", lines=["a line"]),
            "w: cannot be read: no permission.\na line",
        ),
        (OSError(5, "Input/output error"), "OSError: [Errno 5] Input/output error"),
    ],
)
def test_all_end_where_one_cannot_read(error: Exception, others: str, tmp_path: Path) -> None:
    saved = random_saved(np.random.default_rng(3), tmp_path)
    whole = Box.whole(saved.array.shape)
    source = Failing(open_checkpoint(saved.directory), error)
    # Replicas: process 2 reads one of the stored boxes for all, as it does for the others.
    found = together(saved, {process: [whole] for process in range(3)}, {2: source})
    assert found[2] is error
    assert [type(one) for one in found[:2]] == [CheckpointError] * 2
    assert str(found[0]) == str(found[1])
    expected = f"{saved.directory}: tensor 'w': process 2 of 3 could not read its part, which others need too. Its error: {others}"
    assert expected in str(found[0])


def test_damage_that_one_process_finds_is_damage_to_all(tmp_path: Path) -> None:
    saved = random_saved(np.random.default_rng(3), tmp_path)
    whole = Box.whole(saved.array.shape)
    error = DamagedError("bytes 0 to 4 do not match their digest.")
    source = Failing(open_checkpoint(saved.directory), error)
    found = together(saved, {process: [whole] for process in range(3)}, {1: source})
    assert [type(one) for one in found] == [DamagedError] * 3
    assert {str(one) for one in found} == {str(error)}


@pytest.mark.parametrize("after", [0, 1, 2])
def test_all_end_where_one_fails_between_two_reads(after: int, tmp_path: Path) -> None:
    """``after``: so many reads. The others wait in the next one, or are done."""
    saved = random_saved(np.random.default_rng(3), tmp_path)
    whole = Box.whole(saved.array.shape)
    wants = wants_of((process, whole) for process in range(3))
    error = MemoryError("no room")

    def do(carrier: ThreadCarrier) -> None:
        source = Together(open_checkpoint(saved.directory), lambda _: wants, carrier)

        def read() -> None:
            for number in range(2):
                if carrier.index == 1 and number == after:
                    raise error
                source.read_boxes("w", [whole])
            if carrier.index == 1 and after == 2:
                raise error

        together_or_alone(source, read)

    found = by_all(3, do)
    assert found[1] is error
    others = f"{saved.directory}: process 1 of 3 ended its load. Its error: MemoryError: no room"
    assert [str(one) for one in (found[0], found[2])] == [others] * 2
    assert [type(one) for one in (found[0], found[2])] == [CheckpointError] * 2


def test_tensors_with_the_same_boxes_are_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, planned, needs_of = np.random.default_rng(3), list[int](), schedule.needs_of
    saved = random_saved(rng, tmp_path / "one")
    other = random_saved(rng, tmp_path / "other")
    monkeypatch.setattr(schedule, "needs_of", lambda *given: planned.append(given[2]) or needs_of(*given))
    wants = {
        one.directory: wants_of((process, Box.whole(one.array.shape)) for process in range(2)) for one in (saved, other)
    }

    def read(carrier: ThreadCarrier) -> list[np.ndarray]:
        kept, found = KeptNeeds(), list[np.ndarray]()
        for one in (saved, saved, other, saved):
            source, whole = open_checkpoint(one.directory), Box.whole(one.array.shape)
            found += read_together(source, "w", [whole], wants[one.directory], carrier, kept=kept)
        return found

    for found in by_all(2, read):
        assert all(
            same_bits(*pair) for pair in zip(found, (one.array for one in (saved, saved, other, saved)), strict=True)
        )
    # Of four reads each process plans three: the second one is as the first.
    assert sorted(planned) == [0] * 3 + [1] * 3


def test_other_boxes_and_other_wants_are_planned_anew() -> None:
    whole, rows = Box((0, 0), (4, 4)), [Box((at, 0), (at + 1, 4)) for at in range(4)]
    wants, other_wants = (wants_of((process, whole) for process in range(count)) for count in (2, 3))
    kept = KeptNeeds()
    first = kept(stored_of(rows, 2), wants, 0)
    assert kept(stored_of(rows, 2), wants, 0) is first
    for stored, needed in (([whole], wants), (rows, other_wants), (rows, wants)):
        before, found = first, kept(stored_of(stored, 2), needed, 0)
        assert found is not before
        assert len(found.units.number) == len(stored)
        assert len(found.groups[0].processes) == len(needed[0].processes)
        first = found
    assert kept(stored_of(rows, 2, width=2), wants, 0) is not first
