"""Data files that count what is read of them, or that cannot be opened, for a process of a test."""

from __future__ import annotations

from pathlib import Path
from threading import Lock
from typing import Any

from shardwright.storage.files import open_regular
from shardwright.storage.url import Place


class Counted:
    """A data file. ``total``: the bytes that are read of all of them, in this process."""

    total = 0
    changing = Lock()

    def __init__(self, path: Place) -> None:
        self._file = open_regular(path)

    def seek(self, at: int) -> None:
        self._file.seek(at)

    def readinto(self, data: memoryview) -> int:
        num = self._file.readinto(data) or 0
        # Of an object store, several threads read at a time.
        with Counted.changing:
            Counted.total += num
        return num

    def close(self) -> None:
        self._file.close()


def refused(path: Path) -> Any:
    raise PermissionError(13, "Permission denied", str(path))
