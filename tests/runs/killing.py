"""Runs that save in the background and are killed again and again, and what must be true after each.

    python -m tests.runs.killing OUT [--processes 1] [--kills 30] [--seed 0] [--fault none]

Each run is a fork of a program that has imported all of it. It goes on from the newest checkpoint, and saves every second step
asynchronously. At a random moment, or before a random call of the thread that saves, one of its processes or all are killed;
or one of them gets SIGTERM. ``--fault`` breaks the store on purpose.

Ends with an AssertionError if a kill left an invalid state; otherwise prints the number of kills by where they were.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import shardwright.runs.processes.group as group_module
from shardwright.checkpoint import OwnedBox, TensorInfo, latest, open_checkpoint, verify
from shardwright.checkpoint.folder.directory import committed, leftovers
from shardwright.checkpoint.folder.names import step_of
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import ShardwrightError
from shardwright.runs import StepMetrics, Weights, background
from shardwright.training.cluster import Processes
from shardwright.training.options import METRICS_FILE
from tests.checkpoint import killing
from tests.checkpoint.killing import KEEP, landed, state_of
from tests.checkpoint.states import same_bits
from tests.runs.counting import NOBODY, ROWS, Counting, go, options, plan_of
from tests.runs.test_group import free_port

STEP_S = 0.002
LONGEST_S = 0.12
"""A kill comes so long after the first step at most: that is some saves."""
MOST_CALLS = (150, 25)
"""A kill before a call of the thread that saves comes before one of its first calls, which are those of some saves; of process 0 and
of another one, which does not commit."""
CALLS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree")
PATIENCE_S = 300.0
"""For what takes a second on a machine that does nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """What happens to a run: ``number`` is sent to the processes ``which``, ``after_s`` after the first step; or the one in
    ``which`` is killed before call ``call`` of its thread that saves."""

    number: signal.Signals
    which: tuple[int, ...]
    after_s: float = 0.0
    call: int | None = None

    @property
    def kind(self) -> str:
        if self.number is signal.SIGTERM:
            return "SIGTERM"
        who = "all" if len(self.which) > 1 else "process 0" if self.which == (0,) else "another"
        return f"{who}, {'at a moment' if self.call is None else 'before a call'}"


def drawn(draw: random.Random, count: int) -> Kill:
    if draw.random() < 0.1:
        return Kill(number=signal.SIGTERM, which=(draw.randrange(count),), after_s=draw.uniform(0, LONGEST_S))
    if draw.random() < 0.5:
        process = draw.randrange(count)
        return Kill(number=signal.SIGKILL, which=(process,), call=draw.randrange(MOST_CALLS[process > 0]))
    which = tuple(range(count)) if draw.random() < 0.5 else (draw.randrange(count),)
    return Kill(number=signal.SIGKILL, which=which, after_s=draw.uniform(0, LONGEST_S))


class Filled(Counting):
    """Its state after a step is that of ``state_of``. ``begins``: the step that its run must go on from."""

    def __init__(self, index: int, count: int, begins: int) -> None:
        super().__init__(range(ROWS)[index::count], {"counting": "1"})
        self._index, self._count, self._begins = index, count, begins

    def begin(self, checkpoint: Weights | None, seed: int, *, weights_only: bool = False) -> int:
        del seed
        assert not weights_only
        self._step = 0 if checkpoint is None else checkpoint.point.step
        assert self._step == self._begins, f"the run goes on from step {self._step}, and {self._begins} is the newest"
        if checkpoint is not None:
            assert_state(checkpoint)
        return self._step

    def step(self, batch: Any, before_update: Callable[[], None]) -> StepMetrics:
        time.sleep(STEP_S)
        return super().step(batch, before_update)

    def tensors(self) -> Sequence[TensorInfo]:
        return state_of(0).infos

    def boxes(self) -> Iterator[OwnedBox]:
        for owned in state_of(self._step).owned[self._index :: self._count]:
            yield replace(owned, lasts="until the update")


def assert_state(checkpoint: Any) -> None:
    """Every tensor of a checkpoint has the bits of its step."""
    expected = state_of(checkpoint.point.step).arrays
    assert checkpoint.tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(checkpoint.read_boxes(name, [Box.whole(array.shape)])[0], array), name


def one(folder: Path, index: int, count: int, port: int, begins: int, kill: Kill) -> int:
    """A process of a run: its exit code. Its standard error goes to a file."""
    os.dup2(os.open(folder / f"stderr-{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    if kill.call is not None and kill.which == (index,):
        _kill_before(kill.call)
    changes: dict[str, Any] = {"steps": 1_000_000, "checkpoint_every": 2, "keep": KEEP, "async_checkpoints": True}
    if count > 1:
        changes["processes"] = Processes(
            count=count, index=index, coordinator=f"localhost:{port}", found="a test", stall_timeout_s=60
        )
    try:
        go(Filled(index, count, begins), options(folder), connection=NOBODY, resume=True, **changes)
    except ShardwrightError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return error.exit_code
    return 0


def _kill_before(number: int) -> None:
    left = [number]

    def count(event: str, _: object) -> None:
        if event in CALLS and threading.current_thread().name.startswith("shardwright save"):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(count)


def run_and_kill(folder: Path, count: int, begins: int, kill: Kill) -> tuple[list[int], int]:
    """The exit codes of the processes of a run, and the newest checkpoint that was complete before the kill."""
    port = free_port()
    out = options(folder).out
    lines = _num_lines(out)
    pids: list[int] = []
    for index in range(count):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                code = one(folder, index, count, port, begins, kill)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        pids.append(pid)
    codes: dict[int, int] = {}
    try:
        before = _killed(out, lines, pids, codes, begins, kill)
    finally:
        for pid in [pid for pid in pids if pid not in codes]:
            os.kill(pid, signal.SIGKILL)
    return [codes[pid] for pid in pids], before


def _killed(out: Path, lines: int, pids: Sequence[int], codes: dict[int, int], begins: int, kill: Kill) -> int:
    """Kill, and wait until all have ended. ``lines``: of the metrics, before the run."""
    before = begins
    deadline = time.monotonic() + PATIENCE_S
    while kill.call is None and _num_lines(out) == lines and not _ended(pids, codes):
        assert time.monotonic() < deadline, "no step was done"
        time.sleep(0.002)
    if kill.call is None:
        time.sleep(kill.after_s)
        before = max([begins, *(step_of(path) or 0 for path in committed(out))])
        for index in kill.which:
            if pids[index] not in codes:
                os.kill(pids[index], kill.number)
    while len(_ended(pids, codes)) != len(pids):
        assert time.monotonic() < deadline, f"a process waits for one that was killed: {kill}"
        time.sleep(0.002)
    return before


def _ended(pids: Sequence[int], codes: dict[int, int]) -> dict[int, int]:
    """The exit codes of those that have ended, so far."""
    for pid in pids:
        if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
            codes[pid] = os.waitstatus_to_exitcode(status[1])
    return codes


def assert_valid(folder: Path, count: int, kill: Kill, codes: Sequence[int], before: int) -> int:
    """The newest checkpoint's step. Every directory with a checkpoint's name is one, bit for bit; nothing less passes for one."""
    out = options(folder).out
    said = "".join((folder / f"stderr-{index}").read_text() for index in range(count))
    assert "Traceback" not in said, said
    if kill.number is signal.SIGTERM:
        assert set(codes) == {0}, (codes, said)
    elif kill.call is None:
        assert all(codes[index] == -signal.SIGKILL for index in kill.which), (codes, said)
    assert 0 not in codes or kill.number is signal.SIGTERM, (codes, said)
    found = latest(out)
    assert found.passed_over == (), found.passed_over
    step = 0
    if found.checkpoint is not None:
        step = found.checkpoint.point.step
        checked = verify(out)
        assert checked["ok"], checked
    done = _last_step(out)
    assert before <= step <= done, (
        f"step {step} is the newest, {before} was complete before the kill, and {done} were done"
    )
    if kill.number is signal.SIGTERM:
        assert step == done, f"SIGTERM saved step {step}, and {done} were done"
    for directory in committed(out):
        checkpoint = open_checkpoint(directory)
        assert checkpoint.point.step == step_of(directory)
        assert_state(checkpoint)
    for directory in leftovers(out):
        try:
            open_checkpoint(directory)
        except ShardwrightError:
            continue
        raise AssertionError(f"{directory} passes for a checkpoint")
    return step


def _num_lines(out: Path) -> int:
    try:
        return (out / METRICS_FILE).read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


def _last_step(out: Path) -> int:
    lines = (out / METRICS_FILE).read_bytes().split(b"\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


def break_the_store(fault: str) -> None:
    """Faults that this program must find."""
    killing.break_the_store(fault)
    if fault == "renamed before it is whole":
        background.commit = killing.saves.commit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fault", default="none")
    given = parser.parse_args()
    break_the_store(given.fault)
    # What every run needs is made and loaded once, before the forks. JAX, which grain loads, warns of these.
    plan_of()
    warnings.simplefilter("ignore", RuntimeWarning)
    importlib.import_module("grain")
    out = options(given.out).out
    out.mkdir()
    (out / METRICS_FILE).touch()
    # How long a process that learns of a lost one stays, for other processes than these.
    group_module.GRACE_S, group_module.FAREWELL_S = 0.2, 0.5
    draw, step = random.Random(given.seed), 0
    kinds: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    for number in range(given.kills):
        kill = drawn(draw, given.processes)
        codes, before = run_and_kill(given.out, given.processes, step, kill)
        phases["ended by SIGTERM" if kill.number is signal.SIGTERM else landed(out)] += 1
        kinds[kill.kind] += 1
        try:
            step = assert_valid(given.out, given.processes, kill, codes, before)
        except AssertionError as error:
            raise AssertionError(f"kill {number}, {kill}, exit codes {codes}: {error}") from error
    for found in (phases, kinds):
        print(*(f"{count} {what}" for what, count in found.most_common()), sep="; ")


if __name__ == "__main__":
    main()
