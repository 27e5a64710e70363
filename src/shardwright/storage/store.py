"""Objects of a store as files. A folder is there as long as an object has it in its name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from shardwright.storage import asking, objects
from shardwright.storage.client import reconnect
from shardwright.storage.objects import PARALLEL_REQUESTS, REQUEST_BYTES, ObjectFile
from shardwright.storage.system import Identity, Opened
from shardwright.storage.url import Url


class StoreFiles:
    """A ``FileSystem``. An object appears when all of it is written, and is durable then."""

    parallel = 4
    request_bytes = PARALLEL_REQUESTS * REQUEST_BYTES
    grows = False

    @property
    def pauses_s(self) -> Sequence[float]:
        return asking.PAUSES_S

    def open(self, path: Url) -> Opened:
        # One that is missing raises at the first read.
        return ObjectFile(path)

    def read(self, path: Url, most_bytes: int) -> bytes:
        return objects.read(path, most_bytes)

    def read_settled(self, path: Url, most_bytes: int) -> bytes:
        return asking.read_settled(path, most_bytes)

    def size(self, path: Url) -> int:
        return objects.entry(path).num_bytes

    def exists(self, path: Url) -> bool:
        try:
            objects.entry(path)
        except FileNotFoundError:
            return False
        return True

    def is_file(self, path: Url) -> bool:
        try:
            return not objects.entry(path).is_folder
        except FileNotFoundError:
            return False

    def identity(self, path: Url) -> Identity | None:
        del path
        return None

    def sizes_in(self, folder: Url) -> dict[str, int]:
        return {one.name: one.num_bytes for one in objects.entries(folder)}

    def files_in(self, folder: Url, names: Sequence[str]) -> tuple[str, ...]:
        # One request for all.
        there = self.sizes_in(folder)
        return tuple(name for name in names if name in there)

    def make_folder(self, folder: Url) -> None:
        """There are none."""

    def remove_folder(self, folder: Url) -> None:
        """There are none."""

    def write_small(self, path: Url, data: bytes) -> None:
        objects.put(path, data)

    def write_durable(self, path: Url, data: bytes) -> None:
        objects.put(path, data)

    def replace(self, path: Url, data: bytes) -> None:
        objects.put(path, data)

    def new_file(self, path: Url, num_bytes: int) -> AbstractContextManager[Callable[[Any], object]]:
        return objects.new_object(path, num_bytes)

    def remove(self, paths: Iterable[Url]) -> None:
        objects.remove(list(paths))

    def reconnect(self, path: Url) -> None:
        reconnect(path)

    def is_final(self, error: BaseException | None) -> bool:
        return asking.is_final(error)

    def doubt(self, path: Url, *, missing: bool) -> str | None:
        return asking.doubt(path, missing=missing)

    def resolved(self, path: Url) -> Url:
        return path
