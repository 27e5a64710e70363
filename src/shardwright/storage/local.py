"""Files of this machine."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any, cast

from shardwright.storage.system import Identity, Opened


class LocalFiles:
    """A ``FileSystem``."""

    parallel = 1
    request_bytes = 1
    grows = True
    pauses_s = ()

    def open(self, path: Path) -> Opened:
        mode = path.stat().st_mode
        # For a folder, open() itself raises.
        if not S_ISREG(mode) and not S_ISDIR(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return cast(Opened, path.open("rb", buffering=0))

    def read(self, path: Path, most_bytes: int) -> bytes:
        with self.open(path) as file:
            num_bytes = path.stat().st_size
            if num_bytes > most_bytes:
                raise OSError(errno.EFBIG, f"found {num_bytes:,} bytes, needed at most {most_bytes:,}", str(path))
            return file.read(num_bytes)

    def read_settled(self, path: Path, most_bytes: int) -> bytes:
        return self.read(path, most_bytes)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def exists(self, path: Path) -> bool:
        return path.exists()

    def is_file(self, path: Path) -> bool:
        return path.is_file()

    def identity(self, path: Path) -> Identity | None:
        status = path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def sizes_in(self, folder: Path) -> dict[str, int]:
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

    def files_in(self, folder: Path, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in names if (folder / name).is_file())

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def remove_folder(self, folder: Path) -> None:
        folder.rmdir()

    def write_small(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def write_durable(self, path: Path, data: bytes) -> None:
        # Another process may look for the name at any moment, and must never read a partly written file.
        temporary = path.with_name(f"{path.name}.tmp")
        with self.new_file(temporary, len(data)) as write:
            write(data)
        os.rename(temporary, path)

    def replace(self, path: Path, data: bytes) -> None:
        temporary = path.with_name(f".shardwright-{secrets.token_hex(8)}")
        try:
            temporary.write_bytes(data)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def new_file(self, path: Path, num_bytes: int) -> Iterator[Callable[[Any], object]]:
        del num_bytes
        with path.open("xb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())

    def remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink()

    def reconnect(self, path: Path) -> None:
        """There are none."""

    def is_final(self, error: BaseException | None) -> bool:
        del error
        return True

    def doubt(self, path: Path, *, missing: bool) -> str | None:
        del path, missing

    def resolved(self, path: Path) -> Path:
        return Path(os.path.realpath(path))


def make_durable(directory: Path) -> None:
    """Makes the names in a directory survive a loss of power. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
