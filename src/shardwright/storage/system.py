"""What can be done with files, wherever they are: one type with two implementations, ``local.py`` and ``store.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from shardwright.storage.url import Place

AnyPlace = TypeVar("AnyPlace", bound=Place)

Identity = tuple[int, int, int]
"""What changes when a file is replaced or changed."""


class Opened(Protocol):
    """A file that is opened for reading, without a buffer. Reads past its end return less. Raises OSError."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def seek(self, offset: int, /) -> object: ...
    def read(self, num_bytes: int, /) -> bytes: ...
    def readinto(self, target: memoryview, /) -> int: ...
    def close(self) -> None: ...


class FileSystem(Protocol[AnyPlace]):
    """Files of one kind of place. Every failure is an OSError with its reason.

    ``parallel``: how many files are read or written at a time, where most of the time is waiting. ``request_bytes``: how many bytes of a
    file are asked for at a time, at least. ``grows``: whether a file has a size before all of it is written. ``pauses_s``: before each time that
    a file is read again which seems missing or damaged; none where one read is a proof.
    """

    parallel: int
    request_bytes: int
    grows: bool

    @property
    def pauses_s(self) -> Sequence[float]: ...

    def open(self, path: AnyPlace) -> Opened:
        """A regular file, or a link to one. Raises for a pipe, a device and a socket: a pipe would block, a device might never end."""
        ...

    def read(self, path: AnyPlace, most_bytes: int) -> bytes:
        """All bytes of a regular file. Raises also for one of more than ``most_bytes``."""
        ...

    def read_settled(self, path: AnyPlace, most_bytes: int) -> bytes:
        """As ``read``, of bytes that are written on: one wrong answer of a store is not what they become."""
        ...

    def size(self, path: AnyPlace) -> int: ...

    def exists(self, path: AnyPlace) -> bool:
        """Whether there is a file or folder of this name. Raises where a store does not say."""
        ...

    def is_file(self, path: AnyPlace) -> bool:
        """As ``exists``, of a file."""
        ...

    def identity(self, path: AnyPlace) -> Identity | None:
        """None where files have none, so that what was read of one cannot be known to hold still."""
        ...

    def sizes_in(self, folder: AnyPlace) -> dict[str, int]:
        """The name and the bytes of each file or folder directly in a folder, in no order."""
        ...

    def files_in(self, folder: AnyPlace, names: Sequence[str]) -> tuple[str, ...]:
        """Those of the names that are files of a folder."""
        ...

    def make_folder(self, folder: AnyPlace) -> None:
        """A folder, and those above it, where folders have to be made."""
        ...

    def remove_folder(self, folder: AnyPlace) -> None:
        """An empty folder, where folders have been made."""
        ...

    def write_small(self, path: AnyPlace, data: bytes) -> None:
        """Writes a file at once, not durably."""
        ...

    def write_durable(self, path: AnyPlace, data: bytes) -> None:
        """Writes a new file and makes it durable. It has its name only once it is complete."""
        ...

    def replace(self, path: AnyPlace, data: bytes) -> None:
        """Writes a file, which appears complete and replaces one of its name."""
        ...

    def new_file(self, path: AnyPlace, num_bytes: int) -> AbstractContextManager[Callable[[Any], object]]:
        """A function that writes the next bytes of a new file, which is durable when the block ends. ``num_bytes``: of all of it."""
        ...

    def remove(self, paths: Iterable[AnyPlace]) -> None: ...

    def reconnect(self, path: AnyPlace) -> None:
        """The next read goes through another connection."""
        ...

    def is_final(self, error: BaseException | None) -> bool:
        """Whether an error is about no file, so that to read again is of no use."""
        ...

    def doubt(self, path: AnyPlace, *, missing: bool) -> str | None:
        """Why a file may not be what was read of it several times, or may not be missing; None: there is no reason."""
        ...

    def resolved(self, path: AnyPlace) -> AnyPlace:
        """Equal for two paths of one folder."""
        ...
