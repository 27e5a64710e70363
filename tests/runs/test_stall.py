"""A process that has stopped is named by the others, which end; and no other process is named."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from shardwright.checkpoint import latest
from shardwright.runs.processes.pace import Beat, Pace, Stall, Watch, stall_message
from tests.matrix import rest
from tests.runs.counting import counting, go, options, sums
from tests.runs.processes import COUNT, several
from tests.runs.test_run import losses

HERE = re.escape(f"({socket.gethostname()}, 127.0.0.1)")
LIMIT = r"That is longer than --stall-timeout, 1 s, beyond the longest step, [\d.]+ s\."
ENDS = r"So all end\. Start all of them again, with --resume\."


@pytest.mark.parametrize(
    ("case", "message", "silent", "why"),
    [
        (
            "another stops",
            f"process 1 of 3 {HERE}: no answer for \\d+ s, since step 3: stopped, or the machine hangs.",
            1,
            LIMIT,
        ),
        rest(
            "the first stops",
            "process 0 of 3: no answer for \\d+ s, since step 3: stopped, or the machine hangs.",
            0,
            LIMIT,
        ),
        (
            "a collective gives up",
            f"process 1 of 3 {HERE}: no answer for \\d+ s, since step 3: stopped, or the machine hangs.",
            1,
            r"An operation between the processes has failed because of it\.",
        ),
        (
            "one hangs",
            "no step was done for \\d+ s, since step 3, though all 3 processes answer: they wait for each other, for a "
            "device or for a file.",
            None,
            LIMIT,
        ),
    ],
)
def test_a_stopped_process_is_named_and_all_end(
    case: str, message: str, silent: int | None, why: str, tmp_path: Path
) -> None:
    ended, took_s = several(tmp_path, case)
    assert took_s < 30
    for index, process in enumerate(ended):
        assert process.code == 1
        text = "\n".join(process.messages)
        # A process that wakes up gets the message too, or finds all others gone.
        if index != silent:
            assert re.fullmatch(f"shardwright: process {index} of 3: {message} {why} {ENDS}", text), text
    out = tmp_path / "out"
    assert len(losses(out)) == 3
    found = latest(out)
    assert found.checkpoint is not None
    assert (found.checkpoint.point.step, found.passed_over) == (2, ())
    assert go(counting(), options(tmp_path), resume=True).ended == "finished"
    # Of the steps before, the first process knew its own rows.
    assert losses(out)[2:] == sums(options(tmp_path), 6)[2:]


def test_where_all_stop_for_a_while_none_is_named(tmp_path: Path) -> None:
    ended, _ = several(tmp_path, "all stop for a while")
    assert ended == [(0, [])] * COUNT
    assert len(losses(tmp_path / "out")) == 6


def ticks(watch: Watch, until_s: float) -> Stall | None:
    """The first stall of so many seconds."""
    for _ in range(round(until_s / watch.tick_s)):
        if (stall := watch.tick()) is not None:
            return stall
    return None


def test_silence_counts_beyond_the_longest_step() -> None:
    watch = Watch(range(3), 60)
    for member in range(3):
        watch.heard(member, Beat(9, stepping=False, longest_s=float(10 * member)))
    watch.heard(2)
    assert ticks(watch, 80) is None
    assert watch.tick() == Stall((0, 1, 2), 81.0, 9, 20.0)
    watch.heard(0)
    watch.forget(1)
    stall = watch.tick()
    assert stall is not None
    assert stall.members == (2,)


def test_without_a_step_done_only_silence_counts() -> None:
    """The first step may compile, a checkpoint may take long: whoever does it tells that it is there."""
    watch = Watch(range(2), 60)
    beats = {"compiling": Beat(), "the first step": Beat(7, stepping=True), "saving": Beat(8, False, 2.0)}
    for beat in beats.values():
        for _ in range(1000):
            watch.heard(0, beat)
            watch.heard(1, beat)
            assert watch.tick() is None
    for tick in range(1, 62):
        watch.heard(0, Beat(8, stepping=True, longest_s=2.0))
        watch.heard(1, Beat(8, stepping=True, longest_s=2.0))
        assert watch.tick() is None, tick
    watch.tick()
    for member in range(2):
        watch.heard(member)
    assert watch.tick() == Stall((), 63.0, 8, 2.0)


def test_a_process_stopped_within_a_step_is_named_and_not_all() -> None:
    watch = Watch(range(2), 60)
    for _ in range(30):
        for member in range(2):
            watch.heard(member, Beat(8, stepping=True, longest_s=2.0))
        watch.tick()
    for silent in range(2, 63):
        watch.heard(0, Beat(8, stepping=True, longest_s=2.0))
        assert watch.tick() is None, silent
    watch.heard(0)
    assert watch.tick() == Stall((1,), 63.0, 8, 2.0)


def test_the_pace_is_that_of_the_longest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr("shardwright.runs.processes.pace.time.monotonic", lambda: next(times))
    pace = Pace()
    assert pace.beat == Beat(0, stepping=False, longest_s=0.0)
    with pace.stepping(5):
        assert pace.beat == Beat(4, stepping=True, longest_s=0.0)
    assert pace.beat == Beat(5, stepping=False, longest_s=3.0)
    with pace.stepping(6):
        pass
    assert pace.beat == Beat(6, stepping=False, longest_s=3.0)


def test_many_that_are_silent_are_counted() -> None:
    stall = Stall(tuple(range(1, 8)), 301.0, 0, 0.0)
    assert stall_message(stall, {index: f"p{index}" for index in range(8)}, 8, 300) == (
        "p1, p2, p3, p4, p5 and 2 more: no answer for 301 s, since before the first step: stopped, or the machine hangs. "
        "That is longer than --stall-timeout, 300 s, beyond the longest step, 0.0 s. So all end. Start all of them again, "
        "with --resume."
    )
