"""How many checkpoints are kept: the newest intact ones, at least one."""

from __future__ import annotations

from pathlib import Path

from shardwright.checkpoint.folder.directory import committed, delete
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.reading.opened import open_checkpoint
from shardwright.core.findings.errors import InputError


def check_keep(keep: int | None) -> None:
    """Raises InputError if ``keep`` is below 1."""
    if keep is not None and keep < 1:
        raise InputError(f"found {keep} checkpoints to keep, needed at least 1. Leave it out to keep all.")


def delete_old(out: Path, just_written: Path, keep: int | None) -> tuple[Path, ...]:
    """Deletes the intact checkpoints beyond the ``keep`` newest, and returns them; None keeps all.

    The checkpoint just written is kept whatever its step. A damaged one is neither counted nor deleted: a person has to
    look at it.
    """
    if keep is None:
        return ()
    doomed = tuple(path for path in _intact(out)[keep:] if path != just_written)
    for path in doomed:
        try:
            delete(path)
        except OSError as error:
            raise CheckpointError(
                f"{just_written}: the checkpoint is written, and the old one {path.name} could not be deleted: {error.strerror}."
            ) from error
    return doomed


def _intact(out: Path) -> list[Path]:
    intact: list[Path] = []
    for path in committed(out):
        try:
            open_checkpoint(path)
        except CheckpointError:
            continue
        intact.append(path)
    return intact
