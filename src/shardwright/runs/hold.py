"""A run locks its folder from start to end. A second run in the same folder is refused before it changes anything."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shardwright.checkpoint.folder.file_lock import LockHeldError, acquire, has_locks, note_of_this_process, release
from shardwright.core.findings.errors import InputError
from shardwright.training.options import Listener, require_folder

FILE_NAME = ".lock"
COMMAND_CHARACTERS = 500


@contextmanager
def held(out: Path, shown: Listener) -> Iterator[None]:
    """Lock the folder ``out``. It is made if it is missing, and deleted again if the run leaves nothing in it.

    ``OUT/.lock`` names the run that holds the folder. The lock itself is the kernel's: it ends with the process, however
    that ends. Raises InputError where another run holds the folder, and where it cannot be made or written.
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
        # For people only: a full disk is reported later, where it loses something.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _note().encode(), 0)
        if not has_locks(descriptor):
            shown.say(
                f"the file system of {out} has no file locks: only the file {path} keeps other runs away. If this run is "
                f"killed, delete that file by hand"
            )
        yield
    finally:
        # First the name, then the lock: a run that starts in between finds no file, or makes its own.
        with suppress(OSError):
            path.unlink()
        release(descriptor)
        _delete_empty(made)


def _taken(out: Path, path: Path, made: list[Path]) -> int:
    """The lock of the folder. A refused run may delete the folder after it was made and before it is locked: then try again."""
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
    """The command line of this process, as a person would type it."""
    name = Path(sys.argv[0]).name
    text = shlex.join(["shardwright" if name in ("", "-c", "__main__.py") else name, *sys.argv[1:]])
    return text if len(text) <= COMMAND_CHARACTERS else f"{text[:COMMAND_CHARACTERS]} ..."


def _refusal(out: Path, path: Path, error: LockHeldError) -> str:
    if error.by_lock:
        return (
            f"{out} is held by another run: {error.note}. Nothing was changed. Wait until that run ends, or end it; "
            f"or give this one a folder of its own with --out."
        )
    return (
        f"{out} is held by another run, according to {path}: {error.note}. Nothing was changed. The file system has no file "
        f"locks, so it is unknown whether that run still exists: if not, delete {path}; if it does, wait until it ends, or "
        f"give this one a folder of its own with --out."
    )
