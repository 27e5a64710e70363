"""What a run writes of itself: ``metrics.jsonl``, one object a step, and TensorBoard where it is asked for."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from shardwright.core.errors import InputError
from shardwright.core.run import StepRecord

FILE_NAME = "metrics.jsonl"


class Board(Protocol):
    """What is used of tensorboardX's ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...
    def close(self) -> Any: ...


class BoardWriter(Protocol):
    """Makes a ``Board`` that writes to ``logdir`` and drops what it holds from ``purge_step`` on."""

    def __call__(self, logdir: str, *, purge_step: int) -> Board: ...


class Journal:
    """Where records go. Made by ``journal``."""

    def __init__(self, file: FileIO, board: Board | None) -> None:
        self._file, self._board = file, board

    def write(self, record: StepRecord) -> None:
        values = asdict(record)
        line = (json.dumps(values) + "\n").encode()
        with _explained(Path(str(self._file.name))):
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._board is not None:
            for name in ("loss", "grad_norm", "tokens_per_s"):
                self._board.add_scalar(name, values[name], record.step)


def require_folder(out: Path) -> None:
    """Raises InputError where no files can be made in ``out``, which need not be there. Makes nothing."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise InputError(f"--out {out}: {there} is not a folder. Give a folder, or a name that is free.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {there} may not be written. Give a folder that may.")


def board_writer() -> BoardWriter:
    """TensorBoard's. Raises InputError where it is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboardX. Install it: pip install 'shardwright[tensorboard]'."
        ) from None
    return SummaryWriter


@contextmanager
def journal(out: Path, *, first_step: int, writer: BoardWriter | None) -> Iterator[Journal]:
    """The journal of a run under ``out`` that goes on after ``first_step`` steps.

    Lines of later steps, which a run wrote after its last checkpoint, are dropped: those steps are done again.
    Raises InputError where ``out`` cannot be made or written.
    """
    path = out / FILE_NAME
    with _explained(path):
        out.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(path, first_step)
        partial = path.with_suffix(".jsonl.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)
        # Without a buffer: a line is there when it is written, and a full disk is met here and not when it is closed.
        file = path.open("ab", buffering=0)
    board = None if writer is None else writer(str(out / "tensorboard"), purge_step=first_step + 1)
    with file:
        try:
            yield Journal(file, board)
        finally:
            if board is not None:
                board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    if not path.exists() or step == 0:
        return []
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            # Only a line that a killed run had begun to write can be broken, and its step is done again.
            break
        if number <= step and line.endswith("\n"):
            kept.append(line)
    return kept


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """An operating system's error as one message about the file or folder it was about."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. "
            f"Give a folder that can be written with --out."
        ) from None
