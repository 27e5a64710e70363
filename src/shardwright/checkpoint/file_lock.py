"""A file that one process holds: by a lock of the kernel's, which goes with the process, and a note in it for people."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

NO_LOCKS = frozenset((errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK))
"""What a file system says that has no locks: some network file systems, as they are mounted."""

NOTE_WAIT_S = 0.5
"""Whoever has just taken a file writes its note next; so long the other one waits to read it."""

NOTE_BYTES = 2000

_taken: set[int] = set()


class TakenError(Exception):
    """Another process has the file. ``note``: what it wrote there. ``by_lock``: False where only the file itself says so."""

    def __init__(self, note: str, *, by_lock: bool) -> None:
        super().__init__(note)
        self.note, self.by_lock = note, by_lock


def take(path: Path) -> int:
    """A descriptor of the file, made where it is not there and locked, for ``let_go``.

    Where the file system has no locks, who makes the file has it, until the file is deleted; ``has_locks`` tells. A process
    that is forked meanwhile does not keep it. Raises TakenError and OSError.
    """
    while True:
        descriptor, made = _opened(path)
        try:
            if _locked(descriptor, path, made):
                _taken.add(descriptor)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def has_locks(descriptor: int) -> bool:
    """Whether the file system of a file that was taken has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in NO_LOCKS
    return True


def let_go(descriptor: int) -> None:
    """Give up a file that was taken."""
    _taken.discard(descriptor)
    # Said and not left to close(): a process that was forked without Python's knowledge would go on holding it.
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
    """A descriptor of the file, and whether this process made it."""
    flags = os.O_RDWR | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644), True
        except FileExistsError:
            pass
        try:
            return os.open(path, flags), False
        except FileNotFoundError:
            # Who had it has deleted it meanwhile; a link to nowhere stays.
            if os.path.lexists(path):
                raise


def _locked(descriptor: int, path: Path, made: bool) -> bool:
    """Whether the file is ours now; False where it was deleted before it was locked, and has to be made again."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TakenError(_note(descriptor), by_lock=True) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        if not made:
            raise TakenError(_note(descriptor), by_lock=False) from None
        return True
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(descriptor))


def _note(descriptor: int) -> str:
    deadline = time.monotonic() + NOTE_WAIT_S
    while True:
        note = os.pread(descriptor, NOTE_BYTES, 0).decode(errors="replace").strip()
        if note or time.monotonic() > deadline:
            return note or "another process"
        time.sleep(0.01)


def _forget() -> None:
    """In a forked process: the lock is on what parent and child share, and would outlive the parent in the child."""
    for descriptor in _taken:
        os.close(descriptor)
    _taken.clear()


os.register_at_fork(after_in_child=_forget)
