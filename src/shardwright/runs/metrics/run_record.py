"""What a run was started with, and how it ended: ``run.jsonl`` in its folder, two lines for each command that trained."""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwright.core.plan.plan import Plan
from shardwright.runs.metrics.journal import Say
from shardwright.training.options import RunOptions, RunOutcome
from shardwright.training.started import RECORD_FILE


@contextmanager
def recorded(
    options: RunOptions, plan: Plan, versions: Mapping[str, str], first: int, say: Say
) -> Iterator[list[RunOutcome]]:
    """Writes how the run starts, after ``first`` steps, and at its end how it ended: the outcome that is appended to the list, or an error.

    A run does not end because this cannot be written, as on a full disk: ``say`` gets a line.
    """
    _append(options.out, start_of(options, plan, versions, first), say)
    outcomes: list[RunOutcome] = []
    end: dict[str, Any] = {"ended": "failed"}
    try:
        yield outcomes
        end = outcomes[-1].to_json()
    except BaseException as error:
        end["why"] = f"{type(error).__name__}: {error}"
        raise
    finally:
        _append(options.out, {"event": "end", "time": _now(), **end}, say)


def start_of(options: RunOptions, plan: Plan, versions: Mapping[str, str], first: int) -> dict[str, Any]:
    """The record of a start: the command, all options, versions, the commit of the working directory, and the machine."""
    request = plan.request
    of_run = {
        name: value for name, value in asdict(options).items() if name not in ("command", "arguments", "processes")
    }
    return {
        "event": "start",
        "time": _now(),
        "command": list(options.command),
        "arguments": list(options.arguments),
        "directory": os.getcwd(),
        "after_step": first,
        "model": request.table.name,
        "layout": request.layout.name,
        "mesh": dict(plan.mesh.shape),
        "engine": request.engine,
        "batch": request.batch,
        "length": request.length,
        "options": {name: value if _is_plain(value) else str(value) for name, value in of_run.items()},
        "processes": 1 if options.processes is None else options.processes.count,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "platform": platform.platform(),
        "versions": {"shardwright": _version(), "python": platform.python_version(), **versions},
        "git": _commit(),
    }


def _append(out: Path, record: Mapping[str, Any], say: Say) -> None:
    path = out / RECORD_FILE
    try:
        # The line that a killed run left unfinished ends here.
        ends = not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
        with path.open("ab") as file:
            file.write((b"" if ends else b"\n") + json.dumps(record).encode() + b"\n")
    except OSError as error:
        say(f"{path} cannot be written: {error.strerror}. It does not have the {record['event']} of this command.")


def _is_plain(value: object) -> bool:
    return (
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, list | tuple) and all(_is_plain(one) for one in value))
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _version() -> str | None:
    try:
        return version("shardwright")
    except PackageNotFoundError:
        return None


def _commit() -> dict[str, Any] | None:
    """The commit of the repository of the working directory, and whether files differ from it; None outside of one."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    ended = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, timeout=10, check=True, errors="replace"
    )
    return ended.stdout.strip()
