"""A call in a process of its own, which can be ended while a compiler runs, gives back what a compiler held, and may crash alone."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from shardwright.core.findings.errors import FindingsError, InputError

TICK_S = 0.2
"""Seconds between two calls of ``goes_on``."""

LINE = 300
"""The longest line that is said of a failure."""


class FailedApartError(Exception):
    """The call failed. ``line``: why, in one line. ``codes``: of the findings that refused it."""

    def __init__(self, line: str, codes: tuple[str, ...] = ()) -> None:
        super().__init__(line)
        self.line, self.codes = line, codes


def call_apart(call: Callable[..., Any], arguments: tuple[Any, ...], goes_on: Callable[[], bool]) -> Any:
    """The result of a call of a module's function; None once ``goes_on`` is false. What it writes to standard error is not shown. Raises
    FailedApartError."""
    here, there = get_context("spawn").Pipe(duplex=False)
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        process = get_context("spawn").Process(
            target=_call, args=(there, log.name, call, arguments), daemon=True, name=call.__name__
        )
        process.start()
        there.close()
        try:
            while not here.poll(TICK_S):
                if not goes_on():
                    return None
            done, result = here.recv()
        except EOFError:
            process.join()
            raise FailedApartError(_ended(process.exitcode or 0, Path(log.name))) from None
        finally:
            process.kill()
            process.join()
            here.close()
    if not done:
        raise FailedApartError(*result)
    return result


def _call(there: Connection, log: str, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    # An interrupt is the caller's, who ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    try:
        there.send((True, call(*arguments)))
    except FindingsError as error:
        worst = error.findings[0]
        there.send(
            (False, (_first_line(f"{worst.code}: {worst.found}"), tuple(finding.code for finding in error.findings)))
        )
    except InputError as error:
        there.send((False, (_first_line(str(error)), ())))
    except Exception as error:
        # A compiler raises what it likes, and the others can still be compiled.
        there.send((False, (_first_line(f"{type(error).__name__}: {error}"), ())))


def _ended(code: int, log: Path) -> str:
    """Why a process ended without a result."""
    if code == -signal.SIGKILL:
        return "its process was killed: this machine may lack the memory to compile it"
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    last = f": {_first_line(lines[-1])}" if lines else ""
    return f"its process ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{last}"


def _first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return line if len(line) <= LINE else f"{line[: LINE - 1]}…"
