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


class Hold:
    """The lock of a folder. The file may be deleted by hand meanwhile: it is then locked anew, unless another run was first."""

    def __init__(self, out: Path, descriptor: int) -> None:
        self._out, self._path, self._descriptor = out, out / FILE_NAME, descriptor

    def keep(self) -> None:
        """Called at every step; it costs one look at the file. Raises InputError where another run holds the folder now."""
        if self._is_there():
            return
        try:
            descriptor = acquire(self._path)
        except OSError:
            # A folder that cannot be written is reported where it loses something.
            return
        except LockHeldError as error:
            raise InputError(
                f"{self._path} was deleted while this run held it, and {self._out} is now held by another run: {error.note}. "
                f"This run ends, so that the two do not mix. Its checkpoints are as they were."
            ) from None
        release(self._descriptor)
        self._descriptor = descriptor
        self.note()

    def note(self) -> None:
        # For people only: a full disk is reported later, where it loses something.
        with suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _note().encode(), 0)

    def leave(self) -> None:
        # First the name, then the lock: a run that starts in between finds no file, or makes its own. The name of another's stays.
        with suppress(OSError):
            if self._is_there():
                self._path.unlink()
        release(self._descriptor)

    def _is_there(self) -> bool:
        """Whether the file that is locked still has its name, as far as one can see."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False
        except OSError:
            return True


@contextmanager
def held(out: Path, shown: Listener) -> Iterator[Hold]:
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
    hold = Hold(out, descriptor)
    try:
        hold.note()
        if not has_locks(descriptor):
            shown.say(
                f"the file system of {out} has no file locks: only the file {path} keeps other runs away. If this run is "
                f"killed, delete that file by hand"
            )
        yield hold
    finally:
        hold.leave()
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
