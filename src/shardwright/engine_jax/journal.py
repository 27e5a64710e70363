"""What a run writes of itself: ``metrics.jsonl``, one object a step, and TensorBoard where it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwright.core.errors import InputError
from shardwright.core.run import StepRecord

FILE_NAME = "metrics.jsonl"


class Journal:
    """Where records go. Made by ``journal``."""

    def __init__(self, file: Any, board: Any) -> None:
        self._file, self._board = file, board

    def write(self, record: StepRecord) -> None:
        values = asdict(record)
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        if self._board is not None:
            for name in ("loss", "grad_norm", "tokens_per_s"):
                self._board.add_scalar(name, values[name], record.step)


@contextmanager
def journal(out: Path, *, first_step: int, tensorboard: bool) -> Iterator[Journal]:
    """The journal of a run under ``out`` that goes on after ``first_step`` steps.

    Lines of later steps, which a run wrote after its last checkpoint, are dropped: those steps are done again.
    Raises InputError where TensorBoard is asked for and not installed.
    """
    board = _board(out) if tensorboard else None
    path = out / FILE_NAME
    kept = _lines_until(path, first_step)
    partial = path.with_suffix(".jsonl.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)
    with path.open("a", encoding="utf-8") as file:
        try:
            yield Journal(file, board)
        finally:
            if board is not None:
                board.close()


def _lines_until(path: Path, step: int) -> list[str]:
    if not path.exists() or step == 0:
        return []
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            number = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            # Only a line that a killed run had begun to write can be broken, and its step is done again.
            break
        if number <= step and line.endswith("\n"):
            kept.append(line)
    return kept


def _board(out: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise InputError(
            "--tensorboard needs the package tensorboardX. Install it: pip install 'shardwright[tensorboard]'."
        ) from None
    return SummaryWriter(str(out / "tensorboard"))
