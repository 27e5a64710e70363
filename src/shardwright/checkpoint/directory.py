"""The directory of a run's checkpoints: what its names mean, who may write in it, and what a killed save leaves.

OUT/checkpoints/step-00000010                    a checkpoint: it got this name when it was whole
OUT/checkpoints/step-00000020.saving-5f0c9a17    a save that is running, or was killed
OUT/checkpoints/step-00000005.deleting-81d2e044  a checkpoint that is being deleted, or was when the run was killed
OUT/checkpoints/step-00000020.damaged-9d12c0b7   a checkpoint that was not whole and was passed over; nobody deletes it
OUT/checkpoints/.lock                            held by the process that saves, and by the kernel's hand let go
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwright.checkpoint.errors import CheckpointError

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


def set_aside_after(out: Path, step: int) -> tuple[Path, ...]:
    """Gives the checkpoints of later steps another name, so that a run which passed them over can save those steps again.

    Nothing of them is lost. Returns their new names. Raises CheckpointError where they cannot be renamed.
    """
    renamed = []
    for directory in committed(out):
        if (later := step_of(directory)) is not None and later > step:
            aside = directory.with_name(f"{directory.name}.damaged-{secrets.token_hex(4)}")
            try:
                os.rename(directory, aside)
            except OSError as error:
                raise CheckpointError(f"{directory}: not whole, and cannot be renamed: {error.strerror}.") from error
            renamed.append(aside)
    if renamed:
        make_durable(checkpoints_directory(out))
    return tuple(renamed)


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
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise CheckpointError(
                f"{directory}: {holder or 'another process'} is saving a checkpoint here. "
                f"Wait until it ends, or give this run a directory of its own with --out."
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        # Said and not left to close(): a process forked meanwhile shares the descriptor and would go on holding it.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _entries(out: Path) -> tuple[Path, ...]:
    try:
        return tuple(path for path in checkpoints_directory(out).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
