"""Ranks that tests share: processes that are started once and then run one function after the other, all together.

A test names a function of an importable module and gives it arguments; it gets what each rank answered. A rank that
raises, ends or is not heard of in time fails the test with its number, and the processes are then started anew.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

Meeting = Callable[[int, int, Path], AbstractContextManager[object]]
"""``meeting(rank, num, path)``: what surrounds a function on each rank. ``path``: a file that they alone have, not there
yet."""

LIMIT_S = 120.0
"""How long a test waits for its ranks. Four of them share two cores."""

PRELOADED = ["torch._dynamo", "tests.engine_torch.training", "tests.engine_torch.meeting"]
"""What all ranks import: once, in a process that they are forked from."""

GRACE_S = 1.0
"""How long the other ranks are listened to when one has failed: most often they wait for it, or fail of it."""


class RankError(AssertionError):
    """A rank did not come through, with its number."""


class Ranks:
    """``num`` processes, each started when it is first needed. ``limit_s``: how long each function may take at most."""

    def __init__(self, num: int, meeting: Meeting, limit_s: float = LIMIT_S, pool: _Pool | None = None) -> None:
        self.num = num
        self._limit_s = limit_s
        self._pool = pool or _Pool(meeting)

    def first(self, num: int) -> Ranks:
        """The first ``num`` of them, as if there were no others."""
        assert num <= self.num, (num, self.num)
        return Ranks(num, self._pool.meeting, self._limit_s, self._pool)

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> list[Any]:
        """What ``function(*arguments)`` returned, by rank. Raises RankError."""
        self._pool.start(self.num)
        meeting = next(self._pool.meetings)
        for pipe in self._pool.pipes[: self.num]:
            pipe.send((self.num, meeting, function, arguments))
        try:
            return self._answers(limit_s or self._limit_s)
        except RankError:
            self.end()
            raise

    def end(self) -> None:
        """End the processes, wherever they are."""
        self._pool.end()

    def _answers(self, limit_s: float) -> list[Any]:
        num, pipes = self.num, self._pool.pipes
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        stop = time.monotonic() + limit_s
        while len(answers) + len(failures) < num:
            waiting = {pipes[rank]: rank for rank in range(num) if rank not in answers and rank not in failures}
            ready = wait(list(waiting), timeout=max(0.0, stop - time.monotonic()))
            if not ready:
                break
            for pipe, rank in waiting.items():
                if pipe not in ready:
                    continue
                try:
                    well, answer = pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self._pool.processes[rank]
                    process.join()
                    well, answer = False, f"ended with exit code {process.exitcode}"
                (answers if well else failures)[rank] = answer
            if failures:
                stop = min(stop, time.monotonic() + GRACE_S)
        if failures:
            raise RankError("\n".join(f"rank {rank} of {num} {text}" for rank, text in sorted(failures.items())))
        silent = [rank for rank in range(num) if rank not in answers]
        if silent:
            names = ", ".join(map(str, silent))
            raise RankError(f"not heard of in {limit_s:g} s: rank {names} of {num}")
        return [answers[rank] for rank in range(num)]


class _Pool:
    """Processes that wait to be told what to do, and their pipes, by rank."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.meetings = count()
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, num: int) -> None:
        """As many as there are not yet."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        for rank in range(len(self.processes), num):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.meeting, Path(self._folder.name), theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)

    def end(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
            process.close()
        if self._folder is not None:
            self._folder.cleanup()
        self.processes, self.pipes, self._folder = [], [], None


def _serve(rank: int, meeting: Meeting, folder: Path, pipe: Connection) -> None:
    """Run what comes through the pipe, until it is closed."""
    while True:
        try:
            num, number, function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            with meeting(rank, num, folder / str(number)):
                answer = function(*arguments)
        except BaseException:
            pipe.send((False, f"raised\n{traceback.format_exc()}"))
            return
        pipe.send((True, answer))


def one_answer(answers: Sequence[Any]) -> Any:
    """What all ranks answered alike."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]
