"""The directory of a run's checkpoints: what its names mean, who may write in it, and what a killed save leaves.

OUT/checkpoints/step-00000010                    a checkpoint: it got this name when it was whole
OUT/checkpoints/step-00000020.saving-5f0c9a17    a save that is running, or was killed
OUT/checkpoints/step-00000005.deleting-81d2e044  a checkpoint that is being deleted, or was when the run was killed
OUT/checkpoints/step-00000020.damaged-9d12c0b7   a checkpoint that was proven damaged and was passed over; nobody deletes it
OUT/checkpoints/step-00000020.set-aside-c1e80a3f a checkpoint of a later step than the one a person went on from; the same
OUT/checkpoints/.lock                            held by the process that saves, and by the kernel's hand let go
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.checkpoint.file_lock import TakenError, let_go, note_of_this_process, take
from shardwright.checkpoint.format.errors import CheckpointError

STEP = re.compile(r"step-(\d{8,})")
LEFTOVER = re.compile(r"step-(\d{8,})\.(saving|deleting)-[0-9a-f]{8}")


def checkpoints_directory(out: Path) -> Path:
    return out / "checkpoints"


def step_directory(out: Path, step: int) -> Path:
    return checkpoints_directory(out) / f"step-{step:08d}"


def step_of(directory: Path) -> int | None:
    """The step that a checkpoint directory's name tells, or None for another name."""
    match = STEP.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def committed(out: Path) -> tuple[Path, ...]:
    """The directories that were given a checkpoint's name, newest step first. Says nothing about their content."""
    found = [(step, path) for path in _entries(out) if (step := step_of(path)) is not None]
    return tuple(path for _, path in sorted(found, reverse=True))


def leftovers(out: Path) -> tuple[Path, ...]:
    """Directories of saves and deletions that are running or were killed."""
    return tuple(sorted(path for path in _entries(out) if LEFTOVER.fullmatch(path.name)))


def temporary_name(directory: Path, doing: str) -> Path:
    """A name beside ``directory`` that is recognised as a leftover; ``doing`` is ``saving`` or ``deleting``."""
    return directory.with_name(f"{directory.name}.{doing}-{secrets.token_hex(4)}")


def delete(directory: Path) -> None:
    """Deletes a checkpoint so that, killed at any moment, it leaves a whole one or a recognised leftover."""
    doomed = temporary_name(directory, "deleting")
    os.rename(directory, doomed)
    make_durable(directory.parent)
    shutil.rmtree(doomed)


def set_aside(directory: Path, why: str) -> Path:
    """Gives a checkpoint another name, so that its step can be saved again; ``why`` is ``damaged`` or ``set-aside``.

    Nothing of it is lost. Returns the new name. Raises CheckpointError where it cannot be renamed.
    """
    aside = directory.with_name(f"{directory.name}.{why}-{secrets.token_hex(4)}")
    try:
        os.rename(directory, aside)
        make_durable(directory.parent)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be renamed to {aside.name}: {error.strerror}.") from error
    return aside


def make_durable(directory: Path) -> None:
    """Makes the names in a directory survive a loss of power."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def only_writer(out: Path) -> Iterator[None]:
    """Holds the right to write checkpoints under ``out``, which the kernel takes back when the process dies.

    Raises CheckpointError while another process, or another save of this one, holds it.
    """
    directory = checkpoints_directory(out)
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        make_durable(directory.parent)
    path, descriptor = directory / ".lock", None
    try:
        descriptor = take(path)
    except TakenError as error:
        # Where there are no locks, the run that holds OUT is the only one to save there.
        if error.by_lock:
            raise CheckpointError(
                f"{directory}: {error.note} is saving a checkpoint here. "
                f"Wait until it ends, or give this run a directory of its own with --out."
            ) from None
    if descriptor is None:
        yield
        return
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{note_of_this_process()}\n".encode(), 0)
        yield
    finally:
        let_go(descriptor)


def _entries(out: Path) -> tuple[Path, ...]:
    try:
        return tuple(path for path in checkpoints_directory(out).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
