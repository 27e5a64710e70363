"""The manifest: what a checkpoint holds, where each box is stored, and the state of the run. Page: docs/checkpoint.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from shardwright.core.boxes.box import Box

FORMAT = "shardwright-checkpoint"
VERSION = 1
FILE_NAME = "manifest.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the state: its global shape, the name of its dtype, and its spec in the notation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBox:
    """One box of a tensor: ``num_bytes`` bytes at ``offset`` of ``file``, under the key ``key``.

    ``digest`` is the XXH3 128-bit hash of these bytes, in hex.
    """

    box: Box
    file: str
    key: str
    offset: int
    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor and the boxes that cover it."""

    info: TensorInfo
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One data file. ``header_digest`` is of its first ``header_bytes`` bytes; boxes fill the rest without a gap."""

    name: str
    num_bytes: int
    header_bytes: int
    header_digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """The state of a run when it was saved, other than its tensors.

    ``data_position`` is the global index of the next row to read. ``mesh`` is major first. ``metadata`` is
    everything else that an exact resume needs, as JSON values.
    """

    step: int
    seed: int
    data_position: int
    model: str
    layout_name: str
    layout_text: str
    mesh: Mapping[str, int]
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except the elements of its tensors."""

    point: RunPoint
    files: tuple[StoredFile, ...]
    tensors: Mapping[str, StoredTensor]

    def boxes_by_file(self) -> Mapping[str, Sequence[tuple[TensorInfo, StoredBox]]]:
        """The boxes in each file, with their tensors."""
        found: dict[str, list[tuple[TensorInfo, StoredBox]]] = {file.name: [] for file in self.files}
        for tensor in self.tensors.values():
            for stored in tensor.boxes:
                found[stored.file].append((tensor.info, stored))
        return found


def digest_of(data: Any) -> str:
    """XXH3, 128 bits, in hex, of bytes or a contiguous array."""
    return xxhash.xxh3_128_hexdigest(data)


def content_digest(value: Mapping[str, Any]) -> str:
    """Digest of all manifest fields except ``manifest_digest``, in their order and without spaces between them."""
    rest = {key: item for key, item in value.items() if key != "manifest_digest"}
    return digest_of(json.dumps(rest, separators=(",", ":"), allow_nan=False).encode())


def manifest_text(manifest: Manifest) -> str:
    """The text of ``manifest.json``: one line for each field, file and box."""
    value = manifest_value(manifest)
    lines: list[str] = []
    for key, item in value.items():
        if key == "files":
            lines.append(f' "files": [{_rows(map(_compact, item))}]')
        elif key == "tensors":
            lines.append(f' "tensors": [{_rows(map(_tensor_text, item))}]')
        else:
            lines.append(f" {json.dumps(key)}: {_compact(item)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def manifest_value(manifest: Manifest) -> dict[str, Any]:
    """The manifest as JSON values, its own digest last."""
    point = manifest.point
    value = {
        "format": FORMAT,
        "version": VERSION,
        "step": point.step,
        "seed": point.seed,
        "data_position": point.data_position,
        "model": point.model,
        "layout": {"name": point.layout_name, "text": point.layout_text},
        "mesh": dict(point.mesh),
        "metadata": dict(point.metadata),
        "files": [file_value(file) for file in manifest.files],
        "tensors": [tensor_value(tensor) for tensor in manifest.tensors.values()],
    }
    return {**value, "manifest_digest": content_digest(value)}


def file_value(file: StoredFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "bytes": file.num_bytes,
        "header_bytes": file.header_bytes,
        "header_digest": file.header_digest,
    }


def tensor_value(tensor: StoredTensor) -> dict[str, Any]:
    info = tensor.info
    return {
        "name": info.name,
        "shape": list(info.shape),
        "dtype": info.dtype,
        "spec": info.spec,
        "boxes": [_box_value(stored) for stored in tensor.boxes],
    }


def _box_value(stored: StoredBox) -> dict[str, Any]:
    return {
        "start": list(stored.box.start),
        "stop": list(stored.box.stop),
        "file": stored.file,
        "key": stored.key,
        "offset": stored.offset,
        "bytes": stored.num_bytes,
        "digest": stored.digest,
    }


def _tensor_text(value: Mapping[str, Any]) -> str:
    head = _compact({key: item for key, item in value.items() if key != "boxes"})
    return f'{head[:-1]}, "boxes": [{_rows(map(_compact, value["boxes"]), indent=3)}]}}'


def _rows(rows: Iterable[str], indent: int = 2) -> str:
    space = " " * indent
    text = f",\n{space}".join(rows)
    return f"\n{space}{text}" if text else ""


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
