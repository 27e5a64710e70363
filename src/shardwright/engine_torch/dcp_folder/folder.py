"""A folder of ``torch.distributed.checkpoint``: which tensors and values it holds, and where. No element is read."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch

from shardwright.checkpoint import CheckpointError
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.fields import MOST
from shardwright.checkpoint.format.index import BoxTable, check_cover
from shardwright.checkpoint.format.read_manifest import MAX_DIMS
from shardwright.core.boxes.box import Box
from shardwright.core.findings.bounds import number_text
from shardwright.engine_torch.dcp_folder.pickled import Name, Record, UnknownNameError, unpickled
from shardwright.runs.own_program.entries import StatePath
from shardwright.storage.files import read_regular

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
"""The metadata of some ten million chunks."""
TRUST = "--trust-pickle"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredItem:
    """Bytes of a data file: what ``torch.save`` has written of one tensor or value."""

    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor. ``chunks``: its boxes, which cover it exactly once, and where each is."""

    shape: tuple[int, ...]
    dtype: str
    chunks: Mapping[Box, StoredItem]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * DTYPES[self.dtype].num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpFolder:
    """What a folder holds, by the flattened names of DCP. ``paths``: where each entry is in the state dict.

    ``other``: tensors that no checkpoint of ours can hold, each with the reason. ``trusts``: its pickles were executed.
    """

    path: Path
    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredItem]
    other: Mapping[str, str]
    paths: Mapping[str, StatePath]
    trusts: bool


def open_folder(path: Path, *, trusts: bool = False) -> DcpFolder:
    """Read the metadata of a folder. With ``trusts`` by Python's own unpickler, which runs what the pickle says.

    Raises CheckpointError: it is no such folder or damaged, names other classes, names files outside the folder, its chunks do
    not cover a tensor exactly once, a file is missing or too short.
    """
    source = path / METADATA
    metadata = _read(source, trusts=trusts)
    places = _Places.of(path, source, metadata)
    tensors: dict[str, StoredTensor] = {}
    values: dict[str, StoredItem] = {}
    other: dict[str, str] = {}
    for name, entry in _mapping(source, metadata, "state_dict_metadata").items():
        if type(name) is not str:
            raise _error(source, "a name of its entries is no text")
        kind = _class_of(entry)
        if kind == "BytesStorageMetadata":
            values[name] = places.item(name, None)
        elif kind != "TensorStorageMetadata":
            raise _error(source, f"'{name}' is a {kind}, needed a tensor or bytes")
        else:
            found = _tensor(source, name, entry, places)
            if isinstance(found, str):
                other[name] = found
            else:
                tensors[name] = found
    return DcpFolder(
        path=path,
        tensors=tensors,
        values=values,
        other=other,
        paths=_paths(metadata, [*tensors, *values, *other]),
        trusts=trusts,
    )


def _read(source: Path, *, trusts: bool) -> Any:
    try:
        data = read_regular(source, MAX_METADATA_BYTES)
    except FileNotFoundError:
        raise CheckpointError(_no_metadata(source.parent)) from None
    except OSError as error:
        raise CheckpointError(f"{source}: cannot be read: {error.strerror}.") from error
    try:
        metadata = _executed(data) if trusts else unpickled(data)
    except UnknownNameError as error:
        raise CheckpointError(
            f"{source}: it is a pickle that names '{error}', which is no class of DCP's metadata. A pickle can run any program, so "
            f"it was not read. If you trust who wrote it, give {TRUST}: it is then read by Python's own unpickler, which runs it."
        ) from None
    except CheckpointError as error:
        raise _error(source, error.message) from error
    if _class_of(metadata) not in ("Metadata", "MCoreMetadata"):
        raise _error(source, f"found a {_class_of(metadata)}, needed DCP's Metadata")
    return metadata


def _executed(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise CheckpointError(f"Python cannot unpickle it: {type(error).__name__}: {error}") from error


def _no_metadata(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: no such folder."
    if any(folder.glob("__*.metadata")):
        return (
            f"{folder}: its ranks have saved without collectives, each its own metadata (__0.metadata), so what it holds is known "
            f"to no file. Load it with torch.distributed.checkpoint, and save it with collectives."
        )
    tmp = folder / f"{METADATA}.tmp"
    unfinished = f" {tmp.name} is there: the save was interrupted before its end." if tmp.exists() else ""
    return (
        f"{folder}: there is no {METADATA} in it, so it is no complete folder of torch.distributed.checkpoint.{unfinished} Give "
        f"the folder of one save, which has {METADATA} and *.distcp files."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where DCP has put each item, by name and offset. ``sizes``: of the files that were looked at."""

    folder: Path
    source: Path
    items: Mapping[tuple[str, tuple[int, ...] | None], Any]
    sizes: dict[str, int]

    @classmethod
    def of(cls, folder: Path, source: Path, metadata: Any) -> _Places:
        items: dict[tuple[str, tuple[int, ...] | None], Any] = {}
        for key, place in _mapping(source, metadata, "storage_data").items():
            name, offset = _field(key, "fqn"), _field(key, "offset")
            if type(name) is not str:
                raise _error(source, "a place in storage_data is of no name")
            items[name, None if offset is None else _integers(source, name, offset)] = place
        return cls(folder=folder, source=source, items=items, sizes={})

    def item(self, name: str, offset: tuple[int, ...] | None) -> StoredItem:
        """Where an item is. Raises CheckpointError where that is not in a file of the folder."""
        label = label_of(name, offset)
        place = self.items.get((name, offset))
        if place is None:
            raise _error(self.source, f"{label} is in no file: its bytes are missing")
        file, start, length = (_field(place, key) for key in ("relative_path", "offset", "length"))
        if type(file) is not str or type(start) is not int or type(length) is not int or start < 0 or length < 0:
            raise _error(self.source, f"{label}: its place is not a file with two numbers of bytes")
        if _field(place, "transform_descriptors"):
            raise _error(
                self.source,
                f"{label} was transformed when it was saved ({_field(place, 'transform_descriptors')!r:.80}). Load it with "
                f"torch.distributed.checkpoint, and save it without extensions",
            )
        end, size = start + length, self._size(label, file)
        if end > size:
            raise _error(
                self.folder / file,
                f"{label} ends at byte {number_text(end)}, and the file has {size:,}: it is truncated, or of another save",
            )
        return StoredItem(file=file, offset=start, num_bytes=length)

    def _size(self, label: str, file: str) -> int:
        if file in self.sizes:
            return self.sizes[file]
        parts = PurePosixPath(file).parts
        if not parts or PurePosixPath(file).is_absolute() or ".." in parts or "\0" in file:
            raise _error(self.source, f"{label} is in the file '{file}', which is not in this folder")
        try:
            self.sizes[file] = (self.folder / file).stat().st_size
        except OSError as error:
            raise _error(self.folder / file, f"it has {label}, and cannot be read: {error.strerror}") from error
        return self.sizes[file]


def label_of(name: str, offset: tuple[int, ...] | None) -> str:
    """
    >>> label_of("w", (0, 0)), label_of("w", (0, 4))
    ("'w'", "'w', the chunk at [0, 4]")
    """
    return f"'{name}', the chunk at {list(offset)}" if offset and any(offset) else f"'{name}'"


def _tensor(source: Path, name: str, entry: Any, places: _Places) -> StoredTensor | str:
    """A tensor, or why no checkpoint of ours can hold it."""
    shape, dtype = _integers(source, name, _field(entry, "size")), _dtype(_field(entry, "properties"))
    if dtype is None:
        raise _error(source, f"'{name}' has no dtype")
    if dtype not in DTYPES:
        return f"dtype {dtype}"
    num_bytes = prod(size for size in shape if size) * DTYPES[dtype].num_bytes
    if len(shape) > MAX_DIMS or num_bytes > MOST:
        return f"{len(shape):,} dims, {number_text(num_bytes)} bytes"
    chunks: dict[Box, StoredItem] = {}
    for one in _list(source, name, _field(entry, "chunks")):
        start, sizes = (_integers(source, name, _field(one, key)) for key in ("offsets", "sizes"))
        stop = tuple(a + b for a, b in zip(start, sizes, strict=False))
        if not len(start) == len(sizes) == len(shape) or any(b > most for b, most in zip(stop, shape, strict=True)):
            raise _error(
                source,
                f"'{name}' of shape {shape}: its chunk of shape {_shown(sizes)} at {_shown(start)} is not within it",
            )
        box = Box(start, stop)
        if not box.size:
            continue
        chunks[box] = item = places.item(name, start)
        if item.num_bytes < (needed := box.size * DTYPES[dtype].num_bytes):
            raise _error(
                source,
                f"{label_of(name, start)}: found {item.num_bytes:,} bytes, needed {needed:,} for "
                f"{box.shape} of {dtype}",
            )
    if prod(shape):
        _require_cover(source, name, shape, list(chunks))
    return StoredTensor(shape=shape, dtype=dtype, chunks=chunks)


def _require_cover(source: Path, name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    corners = (np.array([getattr(box, end) for box in boxes], np.int64) for end in ("start", "stop"))
    starts, stops = (one.reshape(len(boxes), len(shape)) for one in corners)
    numbers = np.arange(len(boxes), dtype=np.int32)
    check_cover(source, name, shape, BoxTable.sorted(starts, stops, numbers, numbers))


def _paths(metadata: Any, names: Sequence[str]) -> Mapping[str, StatePath]:
    """The paths that DCP has flattened to names; a name itself where it has kept none."""
    found = _field(metadata, "planner_data")
    kept = found if type(found) is dict else {}

    def path_of(name: str) -> StatePath:
        path: Any = kept.get(name)
        # A list is as long as its largest number, which a name of the same text bounds.
        if type(path) is not tuple or any(type(key) is not str and not (type(key) is int and key >= 0) for key in path):
            return (name,)
        return path if ".".join(map(str, path)) == name else (name,)

    return {name: path_of(name) for name in names}


def _field(value: Any, name: str) -> Any:
    """A field of an object that was read as data, or that Python's unpickler has made. None where it has none."""
    if not isinstance(value, Record):
        return getattr(value, name, None)
    return value.state.get(name) if type(value.state) is dict else None


def _class_of(value: Any) -> str:
    return value.cls.name if isinstance(value, Record) else type(value).__name__


def _dtype(properties: Any) -> str | None:
    """The name of a dtype, which is the first of the properties in a pickle."""
    state: Any = properties.state if isinstance(properties, Record) else getattr(properties, "dtype", None)
    first = state[0] if type(state) is tuple and state else state
    if isinstance(first, Name) and first.module == "torch":
        return first.name
    return str(first).removeprefix("torch.") if isinstance(first, torch.dtype) else None


def _mapping(source: Path, metadata: Any, name: str) -> Mapping[Any, Any]:
    found = _field(metadata, name)
    if not isinstance(found, dict):
        raise _error(source, f"'{name}' is no mapping")
    return found


def _list(source: Path, name: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise _error(source, f"'{name}': its chunks are no list")
    return value


def _integers(source: Path, name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple | torch.Size) or not all(type(one) is int and one >= 0 for one in value):
        raise _error(source, f"'{name}': a shape or a place in it is no list of numbers from 0 up")
    return tuple(value)


def _shown(values: Sequence[int]) -> str:
    shown = [number_text(one) for one in values[:8]] + (["..."] if len(values) > 8 else [])
    return f"[{', '.join(shown)}]"


def _error(place: Path, message: str) -> CheckpointError:
    return CheckpointError(f"{place}: {message}.")
