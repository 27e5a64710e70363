"""Files by their places. Every function is that of the place's ``FileSystem``. Errors are OSErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from shardwright.storage.local import LocalFiles
from shardwright.storage.store import StoreFiles
from shardwright.storage.system import AnyPlace, FileSystem, Identity, Opened
from shardwright.storage.url import Place, Url

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL, STORE = LocalFiles(), StoreFiles()


def system_of(place: AnyPlace) -> FileSystem[AnyPlace]:
    """What knows the files of a place: here the kinds of places are distinguished."""
    return cast(FileSystem[AnyPlace], STORE if isinstance(place, Url) else LOCAL)


def open_regular(path: Place) -> Opened:
    return system_of(path).open(path)


def read_regular(path: Place, most_bytes: int) -> bytes:
    return system_of(path).read(path, most_bytes)


def read_settled(path: Place, most_bytes: int) -> bytes:
    return system_of(path).read_settled(path, most_bytes)


def size_of(path: Place) -> int:
    return system_of(path).size(path)


def exists(path: Place) -> bool:
    return system_of(path).exists(path)


def is_file(path: Place) -> bool:
    return system_of(path).is_file(path)


def identity_of(path: Place) -> Identity | None:
    return system_of(path).identity(path)


def sizes_in(folder: Place) -> dict[str, int]:
    return system_of(folder).sizes_in(folder)


def files_in(folder: Place, names: Sequence[str]) -> tuple[str, ...]:
    return system_of(folder).files_in(folder, names)


def make_folder(folder: Place) -> None:
    system_of(folder).make_folder(folder)


def remove_folder(folder: Place) -> None:
    system_of(folder).remove_folder(folder)


def write_small(path: Place, data: bytes) -> None:
    system_of(path).write_small(path, data)


def write_durable(path: Place, data: bytes) -> None:
    system_of(path).write_durable(path, data)


def replace_file(path: Place, data: bytes) -> None:
    system_of(path).replace(path, data)


def new_file(path: Place, num_bytes: int) -> AbstractContextManager[Callable[[Any], object]]:
    return system_of(path).new_file(path, num_bytes)


def remove_files(paths: Sequence[Place]) -> None:
    """``paths``: all of one kind of place."""
    if paths:
        system_of(paths[0]).remove(paths)


def same_folder(first: Place, second: Place) -> bool:
    return system_of(first).resolved(first) == system_of(second).resolved(second)


def each(place: Place, do: Callable[[Item], Result], items: Iterable[Item]) -> Iterable[Result]:
    """The results of ``do``, in the order of the items: of a store several at a time, since most of the time is waiting."""
    parallel = system_of(place).parallel
    if parallel == 1:
        return map(do, items)
    with ThreadPoolExecutor(parallel, thread_name_prefix="shardwright store") as threads:
        return list(threads.map(do, items))
