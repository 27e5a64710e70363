"""A run locks its folder from start to end: a second run is refused, and nothing is changed."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.runs.hold import held
from shardwright.training.options import RunOptions, Silent
from tests.conftest import ROOT
from tests.runs.counting import Counting, counting, go, options, sums
from tests.runs.processes import several
from tests.runs.test_run import contents, losses

OWN = (
    f"process {os.getpid()} on {re.escape(socket.gethostname())}, since " + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC: \S.*"
)
ADVICE = "Nothing was changed. Wait until that run ends, or end it; or give this one a folder of its own with --out."


class During(Counting):
    """While the fourth step of its run is under way, it has something done."""

    do: Callable[[], None]

    def step(self, batch, before_update):
        metrics = super().step(batch, before_update)
        if metrics.tokens == 4 * 64:
            self.do()
        return metrics


def during(do: Callable[[], None]) -> During:
    engine = During(range(4), {"counting": "1"})
    engine.do = do
    return engine


def refusal(run_options: RunOptions, **changes: Any) -> str:
    before = contents(run_options.out)
    with pytest.raises(InputError) as error:
        go(counting(), run_options, **changes)
    assert contents(run_options.out) == before
    return str(error.value)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("every", [1, None])
def test_the_second_run_is_refused_and_the_first_one_ends_as_alone(
    resume: bool, every: int | None, tmp_path: Path
) -> None:
    run_options = options(tmp_path)
    messages: list[str] = []
    ended = go(
        during(lambda: messages.append(refusal(run_options, resume=resume))), run_options, checkpoint_every=every
    )
    assert ended.ended == "finished"
    assert losses(run_options.out) == sums(run_options, 6)
    assert re.fullmatch(f"{re.escape(str(run_options.out))} is held by another run: {OWN}\\. {ADVICE}", messages[0])
    assert not (run_options.out / ".lock").exists()
    assert not list(run_options.out.glob("**/*damaged*"))


def test_a_lock_that_is_deleted_by_hand_is_locked_again(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    lock = run_options.out / ".lock"
    messages: list[str] = []
    engine = during(lock.unlink)
    first = engine.boxes

    def boxes() -> Any:
        messages.append(refusal(run_options, resume=True))
        return first()

    engine.boxes = boxes
    assert go(engine, run_options).ended == "finished"
    assert len(messages) == 1
    assert not lock.exists()


def test_of_two_runs_that_hold_a_folder_the_first_one_ends(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    lock = run_options.out / ".lock"
    with ExitStack() as other:

        def second() -> None:
            lock.unlink()
            other.enter_context(held(run_options.out, Silent()))

        with pytest.raises(InputError) as caught:
            go(during(second), run_options, checkpoint_every=1)
        assert re.fullmatch(
            f"{re.escape(str(lock))} was deleted while this run held it, and {re.escape(str(run_options.out))} is now held by "
            f"another run: {OWN}\\. This run ends, so that the two do not mix. Its checkpoints are as they were\\.",
            str(caught.value),
        )
        assert lock.exists()
    assert [path.name for path in sorted((run_options.out / "checkpoints").iterdir())] == [
        ".lock",
        *(f"step-0000000{step}" for step in (1, 2, 3)),
    ]


def test_a_folder_is_locked_by_any_of_its_paths(tmp_path: Path) -> None:
    run_options, link = options(tmp_path), tmp_path / "link"
    link.symlink_to(run_options.out)
    messages: list[str] = []
    others = [link, tmp_path / "out" / ".." / "out", Path(os.path.relpath(run_options.out))]

    def second() -> None:
        for out in others:
            with pytest.raises(InputError) as error:
                go(counting(), run_options, out=out, resume=True)
            messages.append(str(error.value))

    go(during(second), run_options)
    assert [message.split(" is held by another run: ")[0] for message in messages] == [str(out) for out in others]


def test_of_several_processes_the_first_holds_the_folder_and_all_end(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    ended, _ = several(tmp_path, "held")
    holder = r"process \d+ on \S+, since [^:]+:\d\d:\d\d UTC: \S.*"
    for process in ended:
        assert process.code == 2
        (messages,) = process.messages
        assert re.fullmatch(
            f"InputError: {re.escape(str(run_options.out))} is held by another run: {holder}\\. {ADVICE}", messages
        )
    assert list(run_options.out.iterdir()) == []


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    with pytest.raises(InputError):
        go(counting(), run_options, out=tmp_path / "a" / "b" / "c", data=str(tmp_path / "nowhere"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


def test_a_forked_process_does_not_hold_the_folder_for_longer(tmp_path: Path) -> None:
    with held(tmp_path, Silent()):
        ready = os.pipe()
        with warnings.catch_warnings():
            # A thread of another test's may live here; the child takes no lock and runs nothing of theirs.
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            os.read(ready[0], 1)
            os._exit(0)
    with held(tmp_path, Silent()):
        os.write(ready[1], b"x")
    assert os.waitpid(child, 0)[1] == 0


def test_a_lock_that_is_a_link_to_nowhere_is_an_error_and_no_loop(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to("/nowhere/at/all")
    with pytest.raises(InputError) as error, held(tmp_path, Silent()):
        pass
    assert str(error.value) == (
        f"{tmp_path}/.lock cannot be written: No such file or directory. Give a folder that can be written with --out."
    )


def test_a_file_system_without_locks_is_reported_and_the_file_itself_keeps_others_away(
    tmp_path: Path, monkeypatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    run_options, shown = options(tmp_path), Silent()
    lock = run_options.out / ".lock"
    messages: list[str] = []
    go(during(lambda: messages.append(refusal(run_options, resume=True))), run_options, checkpoint_every=2)
    assert losses(run_options.out) == sums(run_options, 6)
    assert re.fullmatch(
        f"{re.escape(str(run_options.out))} is held by another run, according to {re.escape(str(lock))}: {OWN}\\. Nothing was changed. The "
        f"file system has no file locks, so it is unknown whether that run still exists: if not, delete "
        f"{re.escape(str(lock))}; if it does, wait until it ends, or give this one a folder of its own with --out\\.",
        messages[0],
    )
    with held(run_options.out, shown):
        assert shown.messages == [
            f"the file system of {run_options.out} has no file locks: only the file {lock} keeps other runs away. If this run is "
            f"killed, delete that file by hand"
        ]
    assert not lock.exists()


RUNS = """
import os, signal, sys, time
from pathlib import Path
from random import Random
from tests.runs.counting import counting, go, options
from shardwright.core.findings.errors import InputError

folder, random, end = Path(sys.argv[1]), Random(int(sys.argv[2])), None
run_options = options(folder)

def run(steps, slow):
    pid = os.fork()
    if pid:
        return pid
    engine = counting()
    step = engine.step
    engine.step = lambda batch, before_update: (time.sleep(slow), step(batch, before_update))[1]
    try:
        go(engine, run_options, steps=60, stop_after=steps, checkpoint_every=1, keep=3, resume=True)
        os._exit(0)
    except InputError as error:
        held = "is held by another run: " in str(error)
        if not held:
            print(error, flush=True)
        os._exit(3 if held else 4)

run_to = lambda step: os.waitstatus_to_exitcode(os.waitpid(run(step, 0), 0)[1])
(run_options.out).mkdir()
(run_options.out / "metrics.jsonl").touch()
for number in range(int(sys.argv[3])):
    both, codes = [run(60, 0.02), run(60, 0.02)], []
    if number % 2:
        # The one that came second has been refused by then.
        ended, status = os.wait()
        both.remove(ended)
        codes.append(os.waitstatus_to_exitcode(status))
    time.sleep(random.random() * 0.2)
    for pid in both:
        os.kill(pid, signal.SIGKILL)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in both]
    print(*sorted(codes), flush=True)
print("last", run_to(60), flush=True)
"""


def test_two_that_start_at_once_and_are_killed_at_random_moments(tmp_path: Path) -> None:
    """Never do two train at once, nothing is moved, and the numbers at the end are those of a run that was never killed."""
    seed, kills = "0", "8"
    command = [sys.executable, "-c", RUNS, str(tmp_path), seed, kills]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    *codes, last = ended.stdout.splitlines()
    assert last == "last 0", ended.stderr
    killed = -int(signal.SIGKILL)
    # Refused, or killed before it could be; never an error, and never both to the end.
    assert set(codes) <= {f"{killed} {killed}", f"{killed} 3", f"{killed} 0", "0 3", "0 0"}, ended.stdout
    assert f"{killed} 3" in codes
    run_options = options(tmp_path)
    out = tmp_path / "out"
    assert losses(out) == sums(run_options, 60)
    assert sorted(path.name for path in out.iterdir()) == ["checkpoints", "metrics.jsonl", "run.jsonl"]
    assert not list((out / "checkpoints").glob("*damaged*"))
