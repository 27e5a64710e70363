"""Files wherever they are: on this machine or in an object store. Errors are OSErrors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, TypeVar, cast, overload

from shardwright.storage import objects
from shardwright.storage.objects import ObjectFile
from shardwright.storage.url import Place, Url

PARALLEL = 4
"""Threads that wait for a store at a time."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@overload
def open_regular(path: Path) -> FileIO: ...
@overload
def open_regular(path: Place) -> FileIO | ObjectFile: ...
def open_regular(path: Place) -> FileIO | ObjectFile:
    """Opens a regular file, or a link to one, unbuffered. Raises OSError, also for a pipe, a device or a socket.

    A pipe would block, and a device might never end. An object that is missing raises at the first read.
    """
    if isinstance(path, Url):
        return ObjectFile(path)
    mode = path.stat().st_mode
    # For a folder, open() itself raises.
    if not S_ISREG(mode) and not S_ISDIR(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return cast(FileIO, path.open("rb", buffering=0))


def read_regular(path: Place, most_bytes: int) -> bytes:
    """All bytes of a regular file. Raises OSError, also for a file of more than ``most_bytes``."""
    if isinstance(path, Url):
        return objects.read(path, most_bytes)
    with open_regular(path) as file:
        num_bytes = path.stat().st_size
        if num_bytes > most_bytes:
            raise OSError(errno.EFBIG, f"found {num_bytes:,} bytes, needed at most {most_bytes:,}", str(path))
        return file.read(num_bytes)


def size_of(path: Place) -> int:
    """The bytes of a file. Raises OSError."""
    return objects.entry(path).num_bytes if isinstance(path, Url) else path.stat().st_size


def exists(path: Place) -> bool:
    """Whether there is a file or folder of this name. Raises OSError where a store does not say."""
    if not isinstance(path, Url):
        return path.exists()
    try:
        objects.entry(path)
    except FileNotFoundError:
        return False
    return True


def is_file(path: Place) -> bool:
    """Whether there is a file of this name. Raises OSError where a store does not say."""
    if not isinstance(path, Url):
        return path.is_file()
    try:
        return not objects.entry(path).is_folder
    except FileNotFoundError:
        return False


def sizes_in(folder: Place) -> dict[str, int]:
    """The name and the bytes of each file or folder directly in a folder, in no order. Raises OSError."""
    if isinstance(folder, Url):
        return {one.name: one.num_bytes for one in objects.entries(folder)}
    found: dict[str, int] = {}
    with os.scandir(folder) as there:
        for one in there:
            try:
                found[one.name] = one.stat().st_size
            except OSError as error:
                if one.is_symlink():
                    # To nothing: only the link is there.
                    found[one.name] = 0
                elif not isinstance(error, FileNotFoundError):
                    raise
                # Else it was renamed or deleted since it was listed.
    return found


def write_small(path: Place, data: bytes) -> None:
    """Writes a file at once, not durably. Raises OSError."""
    if isinstance(path, Url):
        objects.put(path, data)
    else:
        path.write_bytes(data)


def write_durable(path: Place, data: bytes) -> None:
    """Writes a new file and makes it durable. It has its name only once it is complete. Raises OSError."""
    if isinstance(path, Url):
        objects.put(path, data)
        return
    # Another process may look for the name at any moment, and must never read a partly written file.
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, path)


@contextmanager
def new_file(path: Place, num_bytes: int) -> Iterator[Callable[[Any], object]]:
    """A function that writes the next bytes of a new file, which is durable when the block ends. ``num_bytes``: of all of it.

    Raises OSError.
    """
    if isinstance(path, Url):
        with objects.new_object(path, num_bytes) as write:
            yield write
        return
    with path.open("xb") as file:
        yield file.write
        file.flush()
        os.fsync(file.fileno())


def remove_files(paths: Iterable[Place]) -> None:
    """Deletes files. Raises OSError."""
    paths = list(paths)
    objects.remove([path for path in paths if isinstance(path, Url)])
    for path in paths:
        if isinstance(path, Path):
            path.unlink()


def each(place: Place, do: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
    """The results of ``do``, in the order of the items: of a store several at a time, since most of the time is waiting."""
    if not isinstance(place, Url):
        return map(do, items)
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="shardwright store") as threads:
        return list(threads.map(do, items))
