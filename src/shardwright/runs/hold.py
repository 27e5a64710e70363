"""A run holds its folder from start to end, and whoever comes second is refused before anything is touched."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwright.checkpoint.file_lock import LockHeldError, acquire, has_locks, note_of_this_process, release
from shardwright.core.findings.errors import InputError
from shardwright.runs.journal import require_folder
from shardwright.training.options import Listener

FILE_NAME = ".lock"
COMMAND_CHARACTERS = 500


@contextmanager
def held(out: Path, shown: Listener) -> Iterator[None]:
    """Hold ``out``, which is made where it is not there, and deleted again where the run leaves nothing in it.

    ``OUT/.lock`` says who holds it, while it is held: the lock itself is the kernel's and goes with the process, however
    that ends. Raises InputError where another run holds it, and where it cannot be made or written.
    """
    require_folder(out)
    path = out / FILE_NAME
    made: list[Path] = []
    try:
        descriptor = _taken(out, path, made)
    except LockHeldError as error:
        raise InputError(_refusal(out, path, error)) from None
    except OSError as error:
        _delete_empty(made)
        raise InputError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. Give a folder that can be written with --out."
        ) from None
    try:
        # For people alone: that the disk has no room for it is said where something is lost by it.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _note().encode(), 0)
        if not has_locks(descriptor):
            shown.say(
                f"the file system of {out} has no locks: another run is kept away by the file {path} alone, and where this "
                f"one is killed, that file has to be deleted by hand"
            )
        yield
    finally:
        # First the name, then the lock: who waits for neither finds no name, or one of its own.
        with suppress(OSError):
            path.unlink()
        release(descriptor)
        _delete_empty(made)


def _taken(out: Path, path: Path, made: list[Path]) -> int:
    """The lock of the folder, which may be deleted between being made and being locked, by a run that was refused."""
    while True:
        missing = [folder for folder in (out, *out.parents) if not folder.exists()]
        made += [folder for folder in missing if folder not in made]
        out.mkdir(parents=True, exist_ok=True)
        try:
            return acquire(path)
        except FileNotFoundError:
            if out.is_dir():
                raise


def _delete_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            folder.rmdir()


def _note() -> str:
    started = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{note_of_this_process()}, since {started}: {_command()}\n"


def _command() -> str:
    """What this process was started with, as a person would type it."""
    name = Path(sys.argv[0]).name
    text = shlex.join(["shardwright" if name in ("", "-c", "__main__.py") else name, *sys.argv[1:]])
    return text if len(text) <= COMMAND_CHARACTERS else f"{text[:COMMAND_CHARACTERS]} ..."


def _refusal(out: Path, path: Path, error: LockHeldError) -> str:
    if error.by_lock:
        return (
            f"{out} is held by another run: {error.note}. Nothing was touched. Wait until that run ends, or end it; "
            f"or give this one a folder of its own with --out."
        )
    return (
        f"{out} is held by another run, as {path} says: {error.note}. Nothing was touched. The file system has no locks, "
        f"which would tell whether that run is still there: if it is not, delete {path}; if it is, wait until it ends, or "
        f"give this one a folder of its own with --out."
    )
