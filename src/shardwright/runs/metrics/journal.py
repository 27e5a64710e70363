"""The metrics that a run writes: ``metrics.jsonl``, one object per step, and TensorBoard with --tensorboard."""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from shardwright.checkpoint.folder.on_disk import NO_SPACE
from shardwright.core.findings.errors import InputError
from shardwright.runs.metrics.earlier import earlier_lines
from shardwright.training.options import METRICS_FILE, StepRecord

NOT_CURVES = ("step", "time_s")
"""What TensorBoard keeps with each value, not as curves: the step and the time."""

Say = Callable[[str], None]
"""Shows a line that stays."""


class Board(Protocol):
    """The methods of tensorboardX's ``SummaryWriter`` that are used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float | None = None) -> Any: ...
    def close(self) -> Any: ...


class BoardWriter(Protocol):
    """Makes a ``Board`` that writes to ``logdir`` and drops its events from ``purge_step`` on."""

    def __call__(self, logdir: str, *, purge_step: int) -> Board: ...


class Journal:
    """Writes the records of steps. Made by ``journal``."""

    def __init__(self, file: FileIO, board: Board | None) -> None:
        self._file, self._board = file, board

    def write(self, record: StepRecord) -> None:
        values = {name: value for name, value in asdict(record).items() if value is not None}
        line = (json.dumps(values) + "\n").encode()
        with _explained(Path(str(self._file.name))):
            if self._file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._board is not None:
            for name, value in values.items():
                if name not in NOT_CURVES:
                    self._board.add_scalar(name, value, record.step, record.time_s)


def board_writer() -> BoardWriter:
    """TensorBoard's writer. Raises InputError where tensorboardX is not installed."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboardX. Install it: pip install 'shardwright[tensorboard]'."
        ) from None
    return SummaryWriter


def keep_later_lines(out: Path, first_step: int, say: Say) -> None:
    """Copy the lines of the steps after ``first_step`` to another file in the same folder, for --resume-from.

    This comes before any other change: if the run is killed later, the run that resumes it may drop these lines. Raises
    InputError where the file cannot be written.
    """
    path = out / METRICS_FILE
    with _explained(path):
        later = earlier_lines(path.read_bytes() if path.exists() else b"", first_step).later
        if later:
            say(f"{path}: the lines of the steps after {first_step} are kept in {_copy(path, 'set-aside', later)}")


@contextmanager
def journal(out: Path, *, first_step: int, writer: BoardWriter | None, say: Say) -> Iterator[Journal]:
    """The journal of a run under ``out`` that goes on after ``first_step`` steps.

    Lines of later steps, which a run wrote after its last checkpoint, are dropped: those steps are done again. Damaged lines
    are kept in another file. ``say`` gets a line for what does not stay. Raises InputError where ``out`` cannot be written.
    """
    path = out / METRICS_FILE
    with _explained(path):
        out.mkdir(parents=True, exist_ok=True)
        _restore(path, first_step, say)
        # Without a buffer: each line is in the file at once, and a full disk raises here and not at close.
        file = path.open("ab", buffering=0)
    board = None if writer is None else writer(str(out / "tensorboard"), purge_step=first_step + 1)
    with file:
        try:
            yield Journal(file, board)
        finally:
            if board is not None:
                board.close()


def _restore(path: Path, first_step: int, say: Say) -> None:
    """Reduce the file to the lines of the first steps. Only lines of steps that are done again are lost."""
    data = path.read_bytes() if path.exists() else b""
    found = earlier_lines(data, first_step)
    if found.damaged:
        copy = _copy(path, "damaged", [line for _, line in found.damaged])
        numbers = ", ".join(str(number) for number, _ in found.damaged)
        which = f"line {numbers} is" if len(found.damaged) == 1 else f"lines {numbers} are"
        say(f"{path}: {which} damaged; the damaged text is kept in {copy}, and every other line stays")
    if found.incomplete:
        say(f"{path}: the last line is incomplete, as a killed run leaves it; its step is done again")
    kept = b"".join(found.kept)
    if not data.startswith(kept):
        _replace(path, kept)
    elif kept != data:
        # Truncating in place needs no free disk space.
        os.truncate(path, len(kept))


def _copy(path: Path, why: str, lines: Sequence[bytes]) -> Path:
    """A new file with these lines, in the folder of the metrics, made durable."""
    copy = path.with_name(f"{path.name}.{why}-{secrets.token_hex(4)}")
    _write(copy, b"".join(lines))
    return copy


def _replace(path: Path, data: bytes) -> None:
    partial = path.with_name(f"{path.name}.partial")
    with suppress(FileNotFoundError):
        partial.unlink()
    _write(partial, data)
    partial.replace(path)


def _write(path: Path, data: bytes) -> None:
    """Write a new file with ``data``, durably. Where that fails, no file is left."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        with suppress(OSError):
            path.unlink()
        raise


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error of the operating system into one message about its file or folder."""
    try:
        yield
    except OSError as error:
        advice = "Give a folder that can be written with --out."
        if error.errno in NO_SPACE:
            advice = (
                "Free some space, then go on with --resume, from the newest checkpoint. "
                "No checkpoint is lost, and no line before this one."
            )
        raise InputError(f"{error.filename or path} cannot be written: {error.strerror or error}. {advice}") from None
