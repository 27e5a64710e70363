"""How many checkpoints are kept: the newest whole ones, and never fewer than one."""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoint.directory import committed, delete
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.opened import open_checkpoint
from shardwright.core.findings.errors import InputError


def check_keep(keep: int | None) -> None:
    """Raises InputError for a number of checkpoints that would keep none."""
    if keep is not None and keep < 1:
        raise InputError(f"found {keep} checkpoints to keep, needed at least 1. Leave it out to keep all.")


def delete_old(out: Path, just_written: Path, keep: int | None) -> tuple[Path, ...]:
    """Deletes the whole checkpoints beyond the ``keep`` newest, and returns them; None keeps all.

    What was just written stays whatever its step. A damaged one neither counts nor is deleted: it is for a
    person to look at.
    """
    if keep is None:
        return ()
    doomed = tuple(path for path in _whole(out)[keep:] if path != just_written)
    for path in doomed:
        try:
            delete(path)
        except OSError as error:
            raise CheckpointError(
                f"{just_written}: the checkpoint is written, and the old one {path.name} could not be deleted: {error.strerror}."
            ) from error
    return doomed


def _whole(out: Path) -> list[Path]:
    whole: list[Path] = []
    for path in committed(out):
        try:
            open_checkpoint(path)
        except CheckpointError:
            continue
        whole.append(path)
    return whole
