"""The directory of a run's checkpoints: its names, which process may write to it, and the leftovers of a killed save.

OUT/checkpoints/step-00000010                    a checkpoint: it gets this name when it is complete
OUT/checkpoints/step-00000020.saving-5f0c9a17    a save that is running, or was killed
OUT/checkpoints/step-00000005.deleting-81d2e044  a deletion that is running, or was killed
OUT/checkpoints/step-00000020.damaged-9d12c0b7   a checkpoint proven damaged and skipped; never deleted automatically
OUT/checkpoints/step-00000020.set-aside-c1e80a3f a checkpoint of a later step than --resume-from; never deleted automatically
OUT/checkpoints/.lock                            locked by the process that saves; the kernel releases it

In an object store they are those of ``in_store.py``.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardwright.checkpoint.folder import in_store
from shardwright.checkpoint.folder.file_lock import LockHeldError, acquire, note_of_this_process, release
from shardwright.checkpoint.folder.in_store import STEP
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import FILE_NAME
from shardwright.storage.files import exists
from shardwright.storage.url import Place, Url

LEFTOVER = re.compile(r"step-([0-9]{8,})\.(saving|deleting)-[0-9a-f]{8}")
SET_ASIDE = re.compile(r"step-([0-9]{8,})\.(damaged|set-aside)-[0-9a-f]{8}")
LOCK = ".lock"
CHECKPOINTS = "checkpoints"


def checkpoints_directory(out: Place) -> Place:
    return out / CHECKPOINTS


def step_directory(out: Place, step: int) -> Place:
    return checkpoints_directory(out) / f"step-{step:08d}"


def step_of(directory: Place) -> int | None:
    """The step in the name of a checkpoint directory, or None for another name."""
    match = STEP.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def is_step(directory: Place) -> bool:
    """Whether a directory is one step's, by its name or by what is in it. Raises CheckpointError where a store cannot be read."""
    if step_of(directory) is not None:
        return True
    if isinstance(directory, Url):
        with in_store.explained(directory):
            return exists(directory / FILE_NAME)
    return exists(directory / FILE_NAME)


def is_gone(directory: Place) -> bool:
    """Whether a step that was listed exists no more. Raises CheckpointError where a store cannot be read."""
    if isinstance(directory, Url):
        with in_store.explained(directory):
            return not exists(directory / FILE_NAME)
    return step_of(directory) is not None and not directory.exists()


def committed(out: Place) -> tuple[Place, ...]:
    """The directories with the name of a checkpoint, newest step first. Their content is not checked.

    In an object store, only those with a manifest. Raises CheckpointError where a store cannot be read.
    """
    directory = checkpoints_directory(out)
    if isinstance(directory, Url):
        return in_store.committed(directory)
    found = [(step, path) for path in _entries(directory) if (step := step_of(path)) is not None]
    return tuple(path for _, path in sorted(found, reverse=True))


def leftovers(out: Place) -> tuple[Place, ...]:
    """Directories of saves and deletions that are running or were killed. Raises CheckpointError where a store cannot be read."""
    directory = checkpoints_directory(out)
    if isinstance(directory, Url):
        return in_store.steps_in(directory).leftovers
    return tuple(sorted(path for path in _entries(directory) if LEFTOVER.fullmatch(path.name)))


def unknown(out: Place) -> tuple[Place, ...]:
    """What is next to the checkpoints and has no name of theirs. Nothing reads it."""
    directory = checkpoints_directory(out)
    if isinstance(directory, Url):
        return in_store.steps_in(directory).unknown
    known = {
        path.name
        for path in _entries(directory)
        if any(pattern.fullmatch(path.name) for pattern in (STEP, LEFTOVER, SET_ASIDE))
    }
    return tuple(sorted(path for path in _all_entries(directory) if path.name not in known | {LOCK}))


def beside(step: Place) -> frozenset[Place]:
    """What is in a step's directory and is not of its checkpoint, and belongs there: in an object store other attempts to save it,
    and checkpoints of it that were set aside. Raises OSError.
    """
    if isinstance(step, Url):
        return frozenset(step / name for name in in_store.beside(step))
    return frozenset()


def no_checkpoint(directory: Place) -> CheckpointError:
    """The error of a folder that has no checkpoint."""
    return CheckpointError(
        f"{directory}: there is no checkpoint here. Give the --out of a run, or the directory of one step, "
        f"as in OUT/checkpoints/step-00000010."
    )


def temporary_name(directory: Path, doing: str) -> Path:
    """A name next to ``directory`` that is recognised as a leftover; ``doing`` is ``saving`` or ``deleting``."""
    return directory.with_name(f"{directory.name}.{doing}-{secrets.token_hex(4)}")


def delete(directory: Place) -> None:
    """Deletes a checkpoint. If killed at any moment, it leaves a complete checkpoint or a recognised leftover. Raises OSError."""
    if isinstance(directory, Url):
        in_store.delete(directory)
        return
    doomed = temporary_name(directory, "deleting")
    os.rename(directory, doomed)
    make_durable(directory.parent)
    remove(doomed)


def remove(directory: Place) -> None:
    """Deletes a local directory. Of a link to one only the link: what it points to may belong to another run."""
    assert isinstance(directory, Path)
    if directory.is_symlink():
        directory.unlink()
    else:
        shutil.rmtree(directory)


def set_aside(directory: Place, why: str) -> Place:
    """Renames a checkpoint so that its step can be saved again; ``why`` is ``damaged`` or ``set-aside``.

    Nothing of it is lost. Returns the new path, in an object store that of the manifest. Raises CheckpointError if it cannot be
    renamed.
    """
    if isinstance(directory, Url):
        try:
            return in_store.set_aside(directory, why)
        except OSError as error:
            raise CheckpointError(f"{directory}: its manifest cannot be renamed: {error.strerror}.") from error
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
    """Holds the lock for writing checkpoints under a local ``out``. The kernel releases it when the process dies.

    Folders that it has made are deleted again if nothing was written there. Raises CheckpointError while another process,
    or another save of this process, holds it.
    """
    directory = out / CHECKPOINTS
    made: list[Path] = []
    path, descriptor = directory / LOCK, None
    try:
        descriptor = _taken(directory, path, made)
    except LockHeldError as error:
        # On a file system without locks, only the run that holds OUT saves there.
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


def _entries(directory: Path) -> tuple[Path, ...]:
    return tuple(path for path in _all_entries(directory) if path.is_dir())


def _all_entries(directory: Path) -> tuple[Path, ...]:
    try:
        return tuple(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return ()
