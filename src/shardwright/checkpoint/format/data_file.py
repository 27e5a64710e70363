"""A data file: the safetensors format, written as a stream and hashed on the way.

The format is eight bytes (the length of the header, little-endian), a JSON header and the elements. It is written
here and not by the safetensors library because a box is hashed and written in one pass, is created only when it is
written, and is freed afterwards: the state is never in memory twice.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from shardwright.checkpoint.format.dtypes import DTYPES, as_bytes
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.fields import parse_json
from shardwright.checkpoint.format.manifest import StoredBox, StoredFile, TensorInfo, digest_of
from shardwright.checkpoint.format.regular_file import open_regular
from shardwright.core.boxes.box import Box

CHUNK_BYTES = 8 << 20
MAX_FILE_BYTES = 4 << 30
"""A new file is started before one grows past this; a single box larger than this has a file of its own."""
MAX_FILE_BOXES = 100_000
"""A new file is also started before the header grows past the 100 MB that the safetensors library reads."""
METADATA = "__metadata__"
"""The key of a header that names no tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedBox:
    """One box of one tensor, with its elements, as its owner passes it to a save.

    ``array`` has the box's shape and the tensor's dtype (or opaque elements of the same width). Or it is a
    function that returns this array when the box is written, so that device memory is copied box by box.
    """

    name: str
    box: Box
    array: np.ndarray | Callable[[], np.ndarray]


def grouped(
    boxes: Sequence[tuple[TensorInfo, OwnedBox]], max_bytes: int, max_boxes: int = MAX_FILE_BOXES
) -> Iterator[Sequence[tuple[TensorInfo, OwnedBox]]]:
    """The boxes of each file in turn, wide elements first, so that every box is aligned to its elements."""
    ordered = sorted(boxes, key=lambda pair: -DTYPES[pair[0].dtype].num_bytes)
    group: list[tuple[TensorInfo, OwnedBox]] = []
    num_bytes = 0
    for info, owned in ordered:
        size = _num_bytes(info, owned.box)
        if group and (num_bytes + size > max_bytes or len(group) == max_boxes):
            yield group
            group, num_bytes = [], 0
        group.append((info, owned))
        num_bytes += size
    if group:
        yield group


def write_data_file(
    path: Path, boxes: Sequence[tuple[TensorInfo, OwnedBox]], step: int
) -> tuple[StoredFile, tuple[tuple[str, StoredBox], ...]]:
    """Writes one new file and makes it durable. Returns its description, and each box with the name of its tensor.

    Raises OSError, and CheckpointError (SW501) for an array whose shape or dtype does not match its box.
    """
    keys = _keys(boxes)
    header = safetensors_header(
        (
            (key, info.dtype, owned.box.shape, _num_bytes(info, owned.box))
            for key, (info, owned) in zip(keys, boxes, strict=True)
        ),
        {"shardwright": "1", "step": str(step)},
    )
    offset = len(header)
    stored: list[tuple[str, StoredBox]] = []
    with path.open("xb") as file:
        file.write(header)
        for key, (info, owned) in zip(keys, boxes, strict=True):
            num_bytes = _num_bytes(info, owned.box)
            digest = _write_box(file.write, info, owned)
            box = StoredBox(box=owned.box, file=path.name, key=key, offset=offset, num_bytes=num_bytes, digest=digest)
            stored.append((info.name, box))
            offset += num_bytes
        file.flush()
        os.fsync(file.fileno())
    described = StoredFile(name=path.name, num_bytes=offset, header_bytes=len(header), header_digest=digest_of(header))
    return described, tuple(stored)


def read_span(path: Path, offset: int, num_bytes: int) -> Iterator[memoryview]:
    """A span of a file, in chunks. Ends early where the file does. Raises OSError."""
    with open_regular(path) as file:
        file.seek(offset)
        while num_bytes:
            chunk = file.read(min(num_bytes, CHUNK_BYTES))
            if not chunk:
                return
            num_bytes -= len(chunk)
            yield memoryview(chunk)


def digest_of_span(chunks: Iterable[memoryview]) -> str:
    """Digest of bytes given in chunks."""
    hasher = xxhash.xxh3_128()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def check_header(path: Path, header: bytes, boxes: Sequence[tuple[TensorInfo, StoredBox]]) -> None:
    """Compares the header of a file with the boxes that the manifest has in it: other programs read the header alone.

    Raises CheckpointError with both entries of the first key that differs.
    """
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        raise CheckpointError(
            f"{path}: its header has {int.from_bytes(header[:8], 'little'):,} bytes by its own length, "
            f"needed {len(header) - 8:,} as in the manifest."
        )
    found = {key: entry for key, entry in parse_json(header[8:], path).mapping().items() if key != METADATA}
    needed: dict[str, Any] = {}
    for info, stored in boxes:
        if stored.key in needed or stored.key == METADATA:
            raise CheckpointError(f"{path}: tensor '{info.name}', box [{stored.box}]: its key '{stored.key}' is taken.")
        needed[stored.key] = _entry(info.dtype, stored.box.shape, stored.offset - len(header), stored.num_bytes)
    if found == needed:
        return
    key = next(key for key in (*needed, *found) if found.get(key) != needed.get(key))
    raise CheckpointError(
        f"{path}: its header and the manifest differ, so that other programs would read something else. "
        f"Key '{key}': found {_short(found.get(key))}, needed {_short(needed.get(key))}. "
        f"Restore the checkpoint from a copy, or resume from another one."
    )


def _write_box(write: Callable[[memoryview], object], info: TensorInfo, owned: OwnedBox) -> str:
    array = np.asarray(owned.array() if callable(owned.array) else owned.array)
    dtype = DTYPES[info.dtype]
    if array.shape != owned.box.shape or (array.dtype.name != dtype.name and array.dtype != dtype.raw):
        raise CheckpointError(
            f"tensor '{info.name}', box [{owned.box}]: found an array of shape {array.shape} and dtype {array.dtype.name}, "
            f"needed {owned.box.shape} and {info.dtype}.",
            code="SW501",
        )
    data = as_bytes(array).data
    hasher = xxhash.xxh3_128()
    for start in range(0, len(data), CHUNK_BYTES):
        chunk = data[start : start + CHUNK_BYTES]
        hasher.update(chunk)
        write(chunk)
    return hasher.hexdigest()


def _num_bytes(info: TensorInfo, box: Box) -> int:
    return box.size * DTYPES[info.dtype].num_bytes


def _keys(boxes: Sequence[tuple[TensorInfo, OwnedBox]]) -> tuple[str, ...]:
    """Unique keys within a file: the tensor's name for a box that is the full tensor, else the name and the box."""
    used = {METADATA}
    keys: list[str] = []
    for info, owned in boxes:
        key = info.name if owned.box == Box.whole(info.shape) else f"{info.name}[{owned.box}]"
        while key in used:
            key += "'"
        used.add(key)
        keys.append(key)
    return tuple(keys)


def safetensors_header(tensors: Iterable[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file, its elements aligned to eight bytes.

    ``tensors``: the name, the dtype (a key of ``DTYPES``), the shape and the bytes of each, in the order of their elements.
    """
    value: dict[str, object] = {METADATA: dict(metadata)}
    offset = 0
    for name, dtype, shape, num_bytes in tensors:
        value[name] = _entry(dtype, shape, offset, num_bytes)
        offset += num_bytes
    text = json.dumps(value, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _entry(dtype: str, shape: Sequence[int], offset: int, num_bytes: int) -> dict[str, Any]:
    """What a header says of elements that start ``offset`` bytes after it."""
    return {
        "dtype": DTYPES[dtype].safetensors,
        "shape": list(shape),
        "data_offsets": [offset, offset + num_bytes],
    }


def _short(entry: Any) -> str:
    try:
        text = "nothing" if entry is None else json.dumps(entry)
    except RecursionError:
        text = "values that are nested too deeply"
    return text if len(text) <= 200 else text[:197] + "..."
