"""Runs one case in process: its exit code, its output, its time and the peak memory of the process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np

from shardwright.cli.main import main
from tests.fuzz.kinds import KINDS

SLOWEST_S = 5
LONGEST_WAIT = 12
"""How many times as long a case may take on the clock: one that waits for a pipe uses no CPU time."""
MOST_BYTES = 1 << 30
"""Memory that a process may use beyond that before its first case."""


class StartedError(BaseException):
    """An engine or a compiler would start here, which other tests do. No ``except Exception`` catches it."""


class TooLongError(BaseException):
    """The case took longer than ``SLOWEST_S``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """``wrong``: which rule the case violates; empty if none."""

    kind: str
    index: int
    arguments: tuple[str, ...]
    code: int
    seconds: float
    peak_bytes: int
    wrong: str


def cases(total: int) -> Iterator[tuple[str, int]]:
    """Kinds and the numbers of their cases, by their shares."""
    shares = sum(share for _, share in KINDS.values())
    for kind, (_, share) in KINDS.items():
        yield from ((kind, index) for index in range(max(1, round(total * share / shares))))


def run_case(kind: str, index: int, seed: int) -> Outcome:
    """Makes the case of a number in its own folder, runs it there, and checks the result."""
    draw = random.Random(f"{seed}/{kind}/{index}")
    np.random.seed(index)
    out, err = io.StringIO(), io.StringIO()
    wrong, code = "", 0
    with tempfile.TemporaryDirectory() as folder, _inside(Path(folder)):
        arguments = KINDS[kind][0](draw)
        began = time.perf_counter()
        try:
            with (
                _nothing_starts(),
                _at_most(SLOWEST_S),
                contextlib.redirect_stdout(out),
                contextlib.redirect_stderr(err),
            ):
                code = main(arguments)
        except StartedError:
            code = 0
        except TooLongError:
            wrong = f"longer than {SLOWEST_S} s: {''.join(traceback.format_exc().splitlines(keepends=True)[-7:])}"
        except BaseException:
            wrong = traceback.format_exc()
        seconds = time.perf_counter() - began
    return Outcome(
        kind=kind,
        index=index,
        arguments=tuple(arguments),
        code=code,
        seconds=seconds,
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        wrong=wrong
        or judged(
            code, out.getvalue(), err.getvalue(), as_json="--json" in arguments, checks=arguments[:1] == ["check"]
        ),
    )


def run_part(part: tuple[list[tuple[str, int]], int]) -> list[Outcome]:
    """The cases of one process."""
    chosen, seed = part
    # Modules loaded at the first use count for no case.
    run_case("layouts", 0, seed)
    with memory_bound():
        return [run_case(kind, index, seed) for kind, index in chosen]


def judged(code: int, out: str, err: str, *, as_json: bool, checks: bool = False) -> str:
    """Which rule the output of a command violates; empty if none. ``checks``: it has a message for each of its files."""
    if "Traceback (most recent call last)" in out + err:
        return f"a traceback in its output: {(out + err)[-500:]}"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code == 2 and not (err.startswith("shardwright: ") or "error" in out):
        return f"exit code 2 without a message: {err[:200]!r} {out[:200]!r}"
    if code == 2 and err.count("\nshardwright: ") and not checks:
        return f"more than one message: {err[:500]!r}"
    if code == 1 and not (out + err).strip():
        return "exit code 1 without a word"
    if as_json and out.strip() and code != 0:
        try:
            json.loads(out)
        except ValueError:
            return f"--json, and no JSON: {out[:200]!r}"
    return ""


@contextlib.contextmanager
def memory_bound() -> Iterator[None]:
    """No more than ``MOST_BYTES`` beyond what the process has now: a case that asks for more gets a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A limit on the CPU time of this process, so that a busy machine causes no failure; and a longer one on a wait."""

    def ring(*_: object) -> None:
        raise TooLongError

    limits = (
        (signal.SIGVTALRM, signal.ITIMER_VIRTUAL, seconds),
        (signal.SIGALRM, signal.ITIMER_REAL, LONGEST_WAIT * seconds),
    )
    before = [(number, timer, signal.signal(number, ring)) for number, timer, _ in limits]
    for _, timer, limit in limits:
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for number, timer, handler in before:
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _start(*_: object, **__: object) -> None:
    raise StartedError


@contextlib.contextmanager
def _nothing_starts() -> Iterator[None]:
    """Engines and compilers are not started; everything before them runs."""
    # Environment variables of a cluster would be read as several processes.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM", "OMPI", "RANK", "WORLD", "GITHUB"))
    }
    with (
        mock.patch.dict(os.environ, {**kept, "COLUMNS": "100"}, clear=True),
        mock.patch("shardwright.cli.running.train._engine", _start),
        mock.patch("shardwright.cli.running.train.import_module", _start),
        mock.patch("shardwright.cli.running.compile.compile_plan", _start),
        mock.patch("shardwright.cli.reviewing.locked_program.compile_plan", _start),
        mock.patch("shardwright.cli.running.compile.compile_by_dry_run", _start),
    ):
        yield
