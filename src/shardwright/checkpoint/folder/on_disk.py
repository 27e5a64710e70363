"""The steps of a run's folder on this machine: their names appear by renames, and a lock keeps a second save away."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from shardwright.checkpoint.folder.file_lock import (
    LockHeldError,
    acquire,
    claimed,
    is_claimed,
    note_of_this_process,
    release,
)
from shardwright.checkpoint.folder.names import LEFTOVER, LOCK, SET_ASIDE, STEP, saved_before, step_of
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import FILE_NAME, Manifest, manifest_text
from shardwright.checkpoint.format.read_manifest import read_manifest
from shardwright.storage.files import remove_files, write_durable
from shardwright.storage.local import make_durable

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
CLAIMED_AFTER_S = 0.05
ELSEWHERE_S = 120.0
"""A save for which nothing was written for so long gives up."""
NOT_ALLOWED = (errno.EACCES, errno.EPERM, errno.EROFS)


class OnDisk:
    """A ``Steps``."""

    locks = True

    def committed(self, checkpoints: Path, *, once: bool) -> tuple[Path, ...]:
        del once
        found = [(step, path) for path in _folders(checkpoints) if (step := step_of(path)) is not None]
        return tuple(path for _, path in sorted(found, reverse=True))

    def leftovers(self, checkpoints: Path) -> tuple[Path, ...]:
        return tuple(sorted(path for path in _folders(checkpoints) if LEFTOVER.fullmatch(path.name)))

    def under_way(self, leftovers: Sequence[Path]) -> tuple[Path, ...]:
        alive = {leftover for leftover in leftovers if is_claimed(leftover) or _is_written_elsewhere(leftover)}
        if len(alive) < len(leftovers):
            # A save claims its folder just after it has made it.
            time.sleep(CLAIMED_AFTER_S)
            alive |= {leftover for leftover in leftovers if is_claimed(leftover)}
        return tuple(leftover for leftover in leftovers if leftover in alive)

    def unknown(self, checkpoints: Path) -> tuple[Path, ...]:
        known = {
            path.name
            for path in _folders(checkpoints)
            if any(pattern.fullmatch(path.name) for pattern in (STEP, LEFTOVER, SET_ASIDE))
        }
        return tuple(sorted(path for path in _entries(checkpoints) if path.name not in known | {LOCK}))

    def has_manifest(self, directory: Path) -> bool:
        return (directory / FILE_NAME).exists()

    def is_gone(self, directory: Path) -> bool:
        return step_of(directory) is not None and not directory.exists()

    def beside(self, step: Path) -> frozenset[Path]:
        del step
        return frozenset()

    def delete(self, step: Path) -> None:
        doomed = _temporary_name(step, "deleting")
        with nullcontext() if step.is_symlink() else claimed(step):
            os.rename(step, doomed)
            make_durable(step.parent)
            _remove(doomed)

    def set_aside(self, step: Path, why: str) -> Path:
        aside = step.with_name(f"{step.name}.{why}-{secrets.token_hex(4)}")
        try:
            os.rename(step, aside)
            make_durable(step.parent)
        except OSError as error:
            raise CheckpointError(f"{step}: cannot be renamed to {aside.name}: {error.strerror}.") from error
        return aside

    @contextmanager
    def saving(self, final: Path, run: str | None) -> Iterator[Path]:
        """``run`` is not needed: the lock keeps other runs away."""
        del run
        with _only_writer(final.parent):
            for leftover in self.leftovers(final.parent):
                if is_claimed(leftover):
                    raise CheckpointError(
                        f"{leftover}: another process is saving this checkpoint: its lock, {leftover.parent / LOCK}, was deleted. "
                        f"Wait until it ends, or give this one a folder of its own (--out of a run)."
                    )
                _remove(leftover)
            _refuse_to_overwrite(final)
            directory = _temporary_name(final, "saving")
            directory.mkdir()
            try:
                with claimed(directory):
                    yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)

    def joined(self, final: Path, name: str) -> Path | None:
        directory = final.parent / name
        begun = LEFTOVER.fullmatch(name) and name.startswith(f"{final.name}.saving-") and directory.is_dir()
        return directory if begun else None

    def publish(self, directory: Path, final: Path, manifest: Manifest, needless: Sequence[Path]) -> None:
        write_durable(directory / FILE_NAME, manifest_text(manifest).encode())
        read_manifest(directory)
        remove_files(needless)
        make_durable(directory)
        _refuse_to_overwrite(final)
        os.rename(directory, final)

    def make_durable(self, final: Path) -> None:
        make_durable(final.parent)

    def failure(self, final: Path, error: OSError) -> CheckpointError:
        named = Path(os.fsdecode(error.filename)) if isinstance(error.filename, (str, bytes)) else None
        hidden = named is None or any(LEFTOVER.fullmatch(part) for part in named.parts)
        where = "" if hidden else f" ({named})"
        advice = ""
        if error.errno in NO_SPACE:
            advice = " Free some space, then go on with --resume."
        elif error.errno in NOT_ALLOWED:
            advice = " Give a writable directory with --out."
        return CheckpointError(
            f"{final}: this checkpoint could not be written: {error.strerror or error}{where}.{advice} "
            f"Nothing of it was kept, and earlier checkpoints are as they were."
        )


def _is_written_elsewhere(leftover: Path) -> bool:
    """Whether the last save here was of another machine, whose locks may not be seen here, and has written a moment ago."""
    with suppress(OSError):
        note = (leftover.parent / LOCK).read_text(errors="replace").strip()
        machine = note.rpartition(" on ")[2]
        written = max(path.stat().st_mtime for path in (leftover, *leftover.iterdir()))
        return bool(note) and machine != socket.gethostname() and time.time() - written < ELSEWHERE_S
    return False


def _temporary_name(directory: Path, doing: str) -> Path:
    """A name next to ``directory`` that is recognised as a leftover; ``doing`` is ``saving`` or ``deleting``."""
    return directory.with_name(f"{directory.name}.{doing}-{secrets.token_hex(4)}")


def _remove(directory: Path) -> None:
    """Deletes a directory. Of a link to one only the link: what it points to may belong to another run."""
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def _refuse_to_overwrite(final: Path) -> None:
    if os.path.lexists(final):
        raise saved_before(final)


@contextmanager
def _only_writer(directory: Path) -> Iterator[None]:
    """Holds the lock for writing checkpoints in a directory. The kernel releases it when the process dies.

    Folders that it has made are deleted again if nothing was written there. Raises CheckpointError while another process,
    or another save of this process, holds it.
    """
    made: list[Path] = []
    path, descriptor = directory / LOCK, None
    try:
        descriptor = _taken(directory, path, made)
    except LockHeldError as error:
        # On a file system without locks, only the run that holds OUT saves there.
        if error.by_lock:
            raise CheckpointError(
                f"{directory}: {error.note} is saving a checkpoint here. "
                f"Wait until it ends, or give this one a folder of its own (--out of a run)."
            ) from None
    if descriptor is None:
        yield
        return
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{note_of_this_process()}\n".encode(), 0)
        yield
    finally:
        with suppress(OSError):
            if made and [*directory.iterdir()] == [path]:
                path.unlink()
        release(descriptor)
        _delete_empty(made)


def _taken(directory: Path, path: Path, made: list[Path]) -> int:
    """The lock in a directory, which is made if it is missing. A refused save may delete it before it is locked: then try again."""
    while True:
        missing = [folder for folder in (directory, *directory.parents) if not folder.is_dir()]
        made += [folder for folder in missing if folder not in made]
        try:
            if missing:
                directory.mkdir(parents=True, exist_ok=True)
                make_durable(directory.parent)
        except OSError:
            _delete_empty(made)
            raise
        try:
            return acquire(path)
        except FileNotFoundError:
            if directory.is_dir():
                raise


def _delete_empty(folders: list[Path]) -> None:
    with suppress(OSError):
        for folder in sorted(folders, key=lambda folder: -len(folder.parts)):
            folder.rmdir()


def _folders(directory: Path) -> tuple[Path, ...]:
    return tuple(path for path in _entries(directory) if path.is_dir())


def _entries(directory: Path) -> tuple[Path, ...]:
    try:
        return tuple(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
