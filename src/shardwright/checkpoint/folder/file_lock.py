"""An exclusive lock on a file: a kernel lock, which ends with the process, and a note in the file for people."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NO_LOCKS = frozenset((errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK))
"""Errors of a file system without locks: some network file systems, depending on mount options."""

NOTE_WAIT_S = 0.5
"""A process that has just acquired the lock writes its note next. Another process waits this long to read it."""

NOTE_BYTES = 2000
CLAIM_TRIES = 100

_acquired: set[int] = set()


class LockHeldError(Exception):
    """Another process holds the file. ``note``: what it wrote there. ``by_lock``: False where only the file's existence shows it."""

    def __init__(self, note: str, *, by_lock: bool) -> None:
        super().__init__(note)
        self.note, self.by_lock = note, by_lock


def acquire(path: Path) -> int:
    """Locks the file, which is created if it does not exist. Returns a descriptor for ``release``.

    On a file system without locks, the process that creates the file holds it until the file is deleted; ``has_locks`` reports
    which case it is. A process forked meanwhile does not keep the lock. Raises LockHeldError and OSError.
    """
    while True:
        descriptor, created = _opened(path)
        try:
            if _locked(descriptor, path, created):
                _acquired.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Marks a folder as that of a process that lives, as long as the block does; without effect where folders have no locks."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for _ in range(CLAIM_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            # A process that looks whether it is claimed holds it for a moment.
            time.sleep(0.001)
        except OSError:
            break
    _acquired.add(descriptor)
    try:
        yield
    finally:
        release(descriptor)


def is_claimed(folder: Path) -> bool:
    """Whether a process that lives has marked a folder as its own."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: of two processes that look, neither sees the other.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    finally:
        os.close(descriptor)
    return False


def has_locks(descriptor: int) -> bool:
    """Whether the file system of an acquired file has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True


def release(descriptor: int) -> None:
    """Releases an acquired file."""
    _acquired.discard(descriptor)
    # Explicit, not left to close(): a process that was forked without Python's knowledge would still hold the lock.
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def note_of_this_process() -> str:
    """
    >>> import re; re.fullmatch(r"process \\d+ on \\S+", note_of_this_process()) is not None
    True
    """
    return f"process {os.getpid()} on {socket.gethostname()}"


def _opened(path: Path) -> tuple[int, bool]:
    """A descriptor of the file, and whether this process created it."""
    flags = os.O_RDWR | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            pass
        try:
            return os.open(path, flags), False
        except FileNotFoundError:
            # The former holder has deleted it meanwhile; a dangling link remains an error.
            if os.path.lexists(path):
                raise


def _locked(descriptor: int, path: Path, created: bool) -> bool:
    """Whether this process now holds the file; False if it was deleted before it was locked and must be created again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise LockHeldError(_note(descriptor), by_lock=True) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if not created:
            raise LockHeldError(_note(descriptor), by_lock=False) from None
        return True
    try:
        at_path = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(at_path, os.fstat(descriptor))


def _note(descriptor: int) -> str:
    deadline = time.monotonic() + NOTE_WAIT_S
    while True:
        note = os.pread(descriptor, NOTE_BYTES, 0).decode(errors="replace").strip()
        if note or time.monotonic() > deadline:
            return note or "another process"
        time.sleep(0.01)


def _close_in_child() -> None:
    """In a forked process: parent and child share the locked descriptor, so the child would keep the parent's lock alive."""
    for descriptor in _acquired:
        os.close(descriptor)
    _acquired.clear()


os.register_at_fork(after_in_child=_close_in_child)
