"""The group of processes of a run, without a framework: threads take the place of processes."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright.runs.processes.group as group_module
from shardwright.checkpoint import CheckpointError, OwnedBox, RunPoint, TensorInfo, open_checkpoint
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.runs import saving
from shardwright.runs.processes.channel import Channel
from shardwright.runs.processes.group import Alone, Ending, ExchangedValue, Several, must_agree
from shardwright.runs.processes.rendezvous import rendezvous
from shardwright.training.cluster import Processes
from shardwright.training.options import Silent

WAIT_S = 60
"""For what takes milliseconds on a machine that does nothing else."""

Member = Callable[[Several], Any]


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def one_of(index: int, count: int, port: int, join_timeout_s: int = WAIT_S) -> Processes:
    where = f"localhost:{port}"
    return Processes(count=count, index=index, coordinator=where, found="a test", join_timeout_s=join_timeout_s)


def meet_all(who: list[Processes]) -> list[Any]:
    """The group, or the InputError, of each."""

    def met(one: Processes) -> Several | InputError:
        try:
            return rendezvous(one, Silent())
        except InputError as error:
            return error

    with ThreadPoolExecutor(len(who)) as pool:
        return list(pool.map(met, who))


@contextmanager
def together(count: int) -> Iterator[list[Several]]:
    port = free_port()
    groups = meet_all([one_of(index, count, port) for index in range(count)])
    try:
        yield groups
    finally:
        # The first waits for the others.
        for group in reversed(groups):
            group.leave()


def each(groups: list[Several], do: Member) -> list[Any]:
    """What ``do`` returns or raises in each."""

    def done(group: Several) -> Any:
        try:
            return do(group)
        except (InputError, AssertionError) as error:
            return error

    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(done, groups))


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int]]]:
    """The threads that would have ended their process, and with which exit code."""
    exits: list[tuple[str, int]] = []
    begun: list[Several] = []
    begin = Several.__init__

    def noted(self: Several, *arguments: Any, **named: Any) -> None:
        begun.append(self)
        begin(self, *arguments, **named)

    for wait in ("GRACE_S", "FAREWELL_S"):
        monkeypatch.setattr(group_module, wait, 0.2)
    monkeypatch.setattr(os, "_exit", lambda code: exits.append((threading.current_thread().name, code)))
    monkeypatch.setattr(Several, "__init__", noted)
    yield exits
    # Their processes go on: five minutes later, their heartbeats would end this one in earnest.
    for group in begun:
        group._leaving.set()


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_all_get_the_same_values_and_who_had_each_first() -> None:
    with together(4) as groups:
        for name in ("one", "two"):
            values = each(groups, lambda group, name=name: group.exchange(name, [name, group.index // 2]))
            assert values == [[ExchangedValue([name, 0], 0), ExchangedValue([name, 1], 2)]] * 4
    assert Alone().exchange("one", 5) == [ExchangedValue(5, 0)]


def test_differences_are_named_in_all_processes() -> None:
    with together(3) as groups:
        same = each(groups, lambda group: must_agree(group, {"seed": 1}, "the first"))
        assert same == [None] * 3
        values = [{"seed": 1, "corpus": "ab", "keep": None}] * 2 + [{"seed": 1, "corpus": "cd", "keep": 2}]
        for error in each(groups, lambda group: must_agree(group, values[group.index], "before the first step")):
            assert isinstance(error, InputError)
            assert str(error) == (
                "before the first step: the 3 processes of this run do not agree:\n"
                "  corpus: 'ab' in process 0, 'cd' in process 2\n"
                "  keep: None in process 0, 2 in process 2\n"
                "Give all of them the same command, text and files. Nothing was started."
            )


@pytest.mark.parametrize("seed", range(4))
def test_all_stop_after_one_step_that_all_have_done(seed: int) -> None:
    """Steps without a collective: nothing but the question itself keeps the processes together."""
    asking, last = seed % 3, 10_000

    def steps(group: Several) -> list[int]:
        pauses = random.Random(seed * 3 + group.index)
        done = []
        for number in range(1, last + 1):
            done.append(number)
            # A thread that never pauses may leave the others no time: it would then do all steps before they ask.
            time.sleep(pauses.random() / 1000)
            ending = group.stop_after(number, last, "SIGTERM" if group.index == asking and number >= 5 else None)
            if number == ending.last:
                assert ending.why == f"SIGTERM in process {asking}"
                return done
        return done

    with together(3) as groups:
        first, *others = each(groups, steps)
        assert 5 <= len(first) < last
        assert first == list(range(1, len(first) + 1))
        assert all(other == first for other in others)


@pytest.mark.parametrize("asking", [(0,), (2,), (0, 1, 2)], ids=str)
def test_a_signal_in_the_first_step_ends_all_after_it(asking: tuple[int, ...]) -> None:
    """Of a run that goes on from step 6."""
    first, last = 7, 99

    def steps(group: Several) -> list[int]:
        done: list[int] = []
        for number in range(first, last + 1):
            done.append(number)
            ending = group.stop_after(number, last, "SIGTERM" if group.index in asking else None)
            if number == ending.last:
                return done
        raise AssertionError("the run does not end")

    with together(3) as groups:
        ended = each(groups, steps)
    # Nothing but the question keeps these processes together: one that hears of the signal late has done more steps.
    assert ended == [ended[0]] * 3
    assert ended[0][0] == first
    assert len(asking) < 3 or ended[0] == [first]


def test_a_single_process_stops_at_its_signal() -> None:
    assert Alone().stop_after(3, 9, None) == Ending(9)
    assert Alone().stop_after(3, 9, "SIGINT") == Ending(3, "SIGINT")


GONE = "is gone: it was killed, or its machine is lost. So this one ends too. Start all of them again, with --resume.\n"


def test_a_lost_process_ends_the_others_and_is_named(ended: list[tuple[str, int]], capsys) -> None:
    port = free_port()
    groups = meet_all([one_of(index, 3, port) for index in range(3)])
    # What the kernel does when a process is killed.
    groups[2]._leaving.set()
    groups[2]._channel.close()
    wait_for(lambda: len(ended) == 2)
    assert ended == [("shardwright group", 1)] * 2
    values = capsys.readouterr().err
    for index in range(2):
        assert f"shardwright: process {index} of 3: process 2 of 3 ({socket.gethostname()}, 127.0.0.1) {GONE}" in values
    groups[1]._channel.close()


def test_the_first_is_gone_with_its_hub(ended: list[tuple[str, int]], capsys) -> None:
    ours, theirs = socket.socketpair()
    Several(1, 2, Channel(ours), None, Silent())
    theirs.close()
    wait_for(lambda: len(ended) == 1)
    assert ended == [("shardwright group", 1)]
    assert capsys.readouterr().err == f"shardwright: process 1 of 2: process 0 of 2 {GONE}"
    ours.close()


def test_an_error_of_one_is_printed_by_the_others(ended: list[tuple[str, int]], capsys) -> None:
    port = free_port()
    groups = meet_all([one_of(index, 2, port) for index in range(2)])
    groups[1].fail(InputError("the disk is full"))
    wait_for(lambda: len(ended) == 1)
    assert ended == [("shardwright group", 2)]
    assert (
        f"shardwright: process 0 of 2: process 1 of 2 ({socket.gethostname()}, 127.0.0.1) ended with an error, so this "
        f"one ends too. Its error:\nthe disk is full\n"
    ) == capsys.readouterr().err
    groups[1]._channel.close()


def test_a_process_missing_from_an_exchange_is_named(ended: list[tuple[str, int]], capsys) -> None:
    port = free_port()
    groups = meet_all([one_of(index, 3, port) for index in range(3)])
    waiting = [
        threading.Thread(target=group.exchange, args=("a checkpoint", None, 0.1), daemon=True)
        for group in groups
        if group.index != 1
    ]
    for thread in waiting:
        thread.start()
    wait_for(lambda: len(ended) == 3)
    assert "a checkpoint: waited 0.1 s for process 1 of 3 (" in capsys.readouterr().err
    for group in reversed(groups):
        group._channel.close()


def test_processes_that_do_not_join_are_named_in_those_that_did() -> None:
    port = free_port()
    errors = meet_all([one_of(0, 4, port, 1), one_of(2, 4, port, 1)])
    assert [str(error) for error in errors] == [
        f"process 0 waited 1 s at localhost:{port} for 3 others (a test), and not all came. Missing: process 1, 3. "
        f"See why they did not start, or give them longer with --join-timeout."
    ] * 2


def test_the_first_process_does_not_start() -> None:
    port = free_port()
    (error,) = meet_all([one_of(1, 2, port, 1)])
    assert str(error) == (
        f"process 1 of 2 did not reach process 0 at localhost:{port} within 1 s (a test): Connection refused. See that "
        f"process 0 runs there, that the host and the port are right and open to this one; or give it longer with "
        f"--join-timeout."
    )


def test_the_port_is_another_programs() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        (error,) = meet_all([one_of(0, 2, port, 1)])
    assert str(error) == (
        f"process 0 cannot listen at port {port} (a test): Address already in use. "
        f"Give --coordinator another port, the same to all processes."
    )


@pytest.mark.parametrize(
    ("who", "message"),
    [
        ([(0, 3), (1, 3), (1, 3)], "two processes have the index 1; one is on "),
        ([(0, 2), (0, 2)], "cannot listen at port "),
        ([(0, 2), (1, 3)], "expects 3 processes, process 0 expects 2. Give each an index of its own (--process)"),
    ],
    ids=["one index twice", "two that are the first", "another number of processes"],
)
def test_processes_with_contradictory_options(who: list[tuple[int, int]], message: str) -> None:
    port = free_port()
    errors = meet_all([one_of(index, count, port, 2) for index, count in who])
    assert any(message in str(error) for error in errors)
    assert sum(isinstance(error, InputError) for error in errors) >= len(who) - 1
    for error in errors:
        if isinstance(error, Several):
            error.leave()


def test_a_stranger_at_the_port_is_no_process() -> None:
    port = free_port()

    def stray() -> None:
        while not stopped.is_set():
            try:
                with socket.create_connection(("localhost", port), timeout=1) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            except OSError:
                time.sleep(0.001)

    stopped = threading.Event()
    stranger = threading.Thread(target=stray)
    stranger.start()
    first = threading.Thread(target=lambda: groups.append(rendezvous(one_of(0, 2, port), Silent())))
    groups: list[Several] = []
    first.start()
    time.sleep(0.1)
    groups.append(rendezvous(one_of(1, 2, port), Silent()))
    first.join()
    stopped.set()
    stranger.join()
    groups.sort(key=lambda group: group.index)
    assert each(groups, lambda group: group.exchange("a", 1)) == [[ExchangedValue(1, 0)]] * 2
    for group in reversed(groups):
        group.leave()


VALUES = np.arange(12, dtype=np.float32).reshape(4, 3)
INFO = TensorInfo(name="w", shape=(4, 3), dtype="float32", spec="rows/a columns")


def save(group: Several, out: Path, boxes: list[tuple[int, int]]) -> Path:
    first, stop = boxes[group.index]
    point = RunPoint(
        step=7, seed=0, data_position=0, model="m", layout_name="l", layout_text="", mesh={"a": 2}, metadata={}
    )
    box = OwnedBox(name="w", box=Box((first, 0), (stop, 3)), array=lambda: VALUES[first:stop])
    return saving.save(out, point, [INFO], iter([box]), group, keep=None)


def test_a_checkpoint_by_several_processes_is_intact(tmp_path: Path) -> None:
    with together(3) as groups:
        paths = each(groups, lambda group: save(group, tmp_path, [(0, 1), (1, 3), (3, 4)]))
    assert set(paths) == {tmp_path / "checkpoints" / "step-00000007"}
    np.testing.assert_array_equal(open_checkpoint(paths[0]).read_box("w"), VALUES)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_checkpoint_that_one_process_cannot_write_is_not_committed(failing: int, tmp_path: Path, monkeypatch) -> None:
    write = saving.write_part

    def write_part(*args: Any, process: int) -> None:
        if process == failing:
            raise CheckpointError("the disk is full")
        write(*args, process=process)

    monkeypatch.setattr(saving, "write_part", write_part)
    with together(2) as groups:
        errors = each(groups, lambda group: save(group, tmp_path, [(0, 2), (2, 4)]))
    values = f"the checkpoint of step 7, write: process {failing} of 2 could not do it. Its error: the disk is full"
    assert [str(error) for error in errors] == ["the disk is full" if i == failing else values for i in range(2)]
    assert not (tmp_path / "checkpoints").exists()


def test_a_checkpoint_with_a_gap_is_refused_in_all(tmp_path: Path) -> None:
    with together(2) as groups:
        errors = each(groups, lambda group: save(group, tmp_path, [(0, 2), (3, 4)]))
    assert all(isinstance(error, CheckpointError) for error in errors)
    assert "process 0 of 2 could not do it" in str(errors[1])
    assert not (tmp_path / "checkpoints").exists()


def test_paths_that_cannot_be_a_folder(tmp_path: Path) -> None:
    with together(2) as groups:
        errors = each(groups, lambda group: save(group, tmp_path / str(group.index), [(0, 2), (2, 4)]))
    assert "Every process must be given the same --out, on a file system that all of them share." in str(errors[1])
    assert "process 1 of 2 could not do it" in str(errors[0])
