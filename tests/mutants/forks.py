"""Runs tests in a fork of a process that has imported the frameworks already, on its own sources."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src" / "shardwright"
MOST_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running fork. ``until``: its deadline, in seconds of the monotonic clock."""

    pid: int
    until: float
    log: Path


def warm_up(environment: Mapping[str, str]) -> dict[str, str]:
    """Imports the packages that are slow to import. Returns the environment of the forks."""
    # The environment of the tests, which JAX reads once.
    import tests.conftest  # noqa: F401

    for name in ("numpy", "hypothesis.strategies", "yaml", "rich.console", "jax.numpy", "optax", "torch"):
        __import__(name)
    assert not any(name.split(".")[0] == "shardwright" for name in sys.modules), "the sources are the fork's own"
    return dict(environment)


def start(environment: Mapping[str, str], sources: Path, log: Path, limit_s: float, work: Callable[[], int]) -> Running:
    """Forks, and runs ``work`` there on the ``shardwright`` in ``sources``, in its own process group."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Running(pid=pid, until=time.monotonic() + limit_s, log=log)
    code = 70
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.environ.clear()
        os.environ.update(environment, PYTHONPATH=f"{sources}{os.pathsep}{ROOT}")
        os.chdir(ROOT)
        sys.path[:0] = [str(sources), str(ROOT)]
        sys.modules.pop("tests.conftest", None)
        code = work()
    except BaseException as error:  # A fork must never continue as its parent.
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def finished(running: Sequence[Running]) -> tuple[Running, int | None] | None:
    """A fork that has ended and its exit code, None if it timed out; None: all are running."""
    for one in running:
        pid, status = os.waitpid(one.pid, os.WNOHANG)
        if pid:
            end_group(one)
            return one, os.waitstatus_to_exitcode(status)
        if time.monotonic() > one.until:
            end_group(one)
            os.waitpid(one.pid, 0)
            return one, None
    return None


def end_group(one: Running) -> None:
    """Kills the process group, including processes that a test has left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)


def pytest_of(tests: Sequence[str], *plugins: object, to_the_end: bool = False) -> int:
    """Pytest's exit code, after the first failure unless ``to_the_end``."""
    # pytest does not rewrite plugins that are imported already.
    already = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    options = [
        *already,
        *([] if to_the_end else ["-x"]),
        "-q",
        "--no-header",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
    ]
    return int(pytest.main([*options, *tests], plugins=list(plugins)))
