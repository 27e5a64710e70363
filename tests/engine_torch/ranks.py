"""Ranks that tests share: processes that are started once, and that all run the same functions, one after the other.

A test gives a function of an importable module and arguments, and gets the result of each rank. A rank that raises,
ends or does not answer in time fails the test with its number, and new processes are then started.
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
"""``meeting(rank, num, path)``: the context of a function on each rank. ``path``: of a file for these ranks only, which does
not exist yet."""

LIMIT_S = 120.0
"""How long a test waits for its ranks. Four of them share two cores."""

PRELOADED = ["torch._dynamo", "tests.engine_torch.training", "tests.engine_torch.meeting"]
"""The modules that all ranks import: once, in the process that they are forked from."""

GRACE_S = 1.0
"""How long the test waits for the other ranks after one has failed: most often they wait for it, or fail because of it."""


class RankError(AssertionError):
    """A rank failed; the message has its number."""


class Ranks:
    """``num`` processes, each started when it is first needed. ``limit_s``: how long each function may take at most."""

    def __init__(self, num: int, meeting: Meeting, limit_s: float = LIMIT_S, pool: _Pool | None = None) -> None:
        self.num = num
        self._limit_s = limit_s
        self._pool = pool or _Pool(meeting)

    def first(self, num: int) -> Ranks:
        """The first ``num`` ranks, without the others."""
        assert num <= self.num, (num, self.num)
        return Ranks(num, self._pool.meeting, self._limit_s, self._pool)

    def run(self, function: Callable[..., Any], *arguments: Any, limit_s: float | None = None) -> list[Any]:
        """The result of ``function(*arguments)`` by rank. Raises RankError."""
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
        """Kill the processes."""
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
            raise RankError(f"no answer in {limit_s:g} s: rank {names} of {num}")
        return [answers[rank] for rank in range(num)]


class _Pool:
    """Processes that wait for functions, and their pipes, by rank."""

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.meetings = count()
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def start(self, num: int) -> None:
        """Start the processes that are missing."""
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
    """Run the functions from the pipe until it is closed."""
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
    """The answer of all ranks, which must be the same."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]
