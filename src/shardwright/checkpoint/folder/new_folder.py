"""A new folder, which gets its name when it is complete. Until then it is FOLDER.writing-5f0c9a17, and FOLDER.writing-lock is held."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.checkpoint.folder.file_lock import LockHeldError, acquire, has_locks, note_of_this_process, release
from shardwright.core.findings.errors import InputError
from shardwright.storage.local import make_durable


@contextmanager
def new_folder(to: Path) -> Iterator[Path]:
    """A folder next to ``to``, which gets its name if the block ends without an error, and else is deleted.

    What a killed writer of the same folder left is deleted first. Raises InputError for a folder that exists and has
    something in it, for one that another process writes, and for what cannot be written.
    """
    require_new(to)
    target = Path(os.path.abspath(to))
    temporary = target.with_name(f"{target.name}.writing-{secrets.token_hex(4)}")
    try:
        if target.parent.is_file():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        target.parent.mkdir(parents=True, exist_ok=True)
        with _only_writer(to, target):
            try:
                temporary.mkdir()
                yield temporary
                make_durable(temporary)
                os.rename(temporary, target)
                make_durable(target.parent)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"--out {to}: the folder could not be written: {error.strerror or error}. Nothing of it was kept. Free some space, "
            f"or give a writable folder."
        ) from None


def require_new(to: Path) -> None:
    """Raises InputError for a folder that exists and has something in it, and for a link."""
    if to.is_symlink():
        raise InputError(f"--out {to}: it is a link. Give the folder that it points to.")
    if to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise InputError(f"--out {to}: it exists already, and is never overwritten. Give another folder.")


@contextmanager
def _only_writer(to: Path, target: Path) -> Iterator[None]:
    """Holds the lock of a new folder. The kernel releases it when the process dies, so leftovers belong to nobody."""
    path = target.with_name(f"{target.name}.writing-lock")
    try:
        descriptor = acquire(path)
    except LockHeldError as error:
        advice = "Wait until it ends" if error.by_lock else f"If it does not exist any more, delete {path}"
        raise InputError(f"--out {to}: {error.note} writes this folder. {advice}, or give another folder.") from None
    try:
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{note_of_this_process()}\n".encode(), 0)
        if has_locks(descriptor):
            leftover = re.compile(re.escape(target.name) + r"\.writing-[0-9a-f]{8}")
            for one in target.parent.iterdir():
                if leftover.fullmatch(one.name) and one.is_dir():
                    shutil.rmtree(one, ignore_errors=True)
        yield
    finally:
        # First the name, then the lock: a process that starts in between makes its own.
        with suppress(OSError):
            path.unlink()
        release(descriptor)
