"""The manifest: which tensors a checkpoint holds, which processes wrote it, and the state of the run. Page: docs/checkpoint.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from shardwright.checkpoint.format.pieces import digest_of
from shardwright.checkpoint.retention.rules import KEEP_ALL, Retention
from shardwright.storage.url import Place

FORMAT = "shardwright-checkpoint"
VERSION = 2
FILE_NAME = "manifest.json"
INDEX_NAME = "boxes.index"
TIME = "%Y-%m-%dT%H:%M:%SZ"
"""How a time is written: UTC, to the second."""


PROGRAM = "program"
"""The key of the metadata that says which framework saved a user's own program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of the state: its global shape, the name of its dtype, and its spec in the notation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    spec: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIndex:
    """The file that says which process wrote which box: its size and its digest."""

    num_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPart:
    """The part file of one process: its size and its digest. ``data_bytes``: of the ``num_files`` data files of the process."""

    num_bytes: int
    digest: str
    num_files: int
    data_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPoint:
    """The state of a run when it was saved, other than its tensors.

    ``data_position`` is the global index of the next row to read. ``mesh`` is major first. ``metadata`` is
    everything else that an exact resume needs, as JSON values. ``metrics``: finite numbers of this step, as its loss.
    """

    step: int
    seed: int
    data_position: int
    model: str
    layout_name: str
    layout_text: str
    mesh: Mapping[str, int]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def of_own_program(self) -> bool:
        """Whether a user's own program saved it, and no run of ours: its model is none of ours."""
        return PROGRAM in self.metadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint except its boxes and their elements. Process i wrote ``parts[i]``.

    ``saved_at``: when it was committed, UTC. ``keep``: the rules by which this save kept older checkpoints. An earlier
    release wrote neither.
    ``folder``: where all other files are, beside the manifest; empty: there is no such folder, they are beside it.
    """

    point: RunPoint
    tensors: Mapping[str, TensorInfo]
    piece_bytes: int
    index: StoredIndex
    parts: tuple[StoredPart, ...]
    saved_at: datetime | None = None
    keep: Retention = KEEP_ALL
    folder: str = ""

    def data_directory(self, directory: Place) -> Place:
        """Where the other files of the checkpoint in ``directory`` are."""
        return directory / self.folder if self.folder else directory


def content_digest(value: Mapping[str, Any]) -> str:
    """Digest of all manifest fields except ``manifest_digest``, in their order and without spaces between them."""
    rest = {key: item for key, item in value.items() if key != "manifest_digest"}
    return digest_of(json.dumps(rest, separators=(",", ":"), allow_nan=False).encode())


def manifest_text(manifest: Manifest) -> str:
    """The text of ``manifest.json``: one line for each field, tensor and part."""
    value = manifest_value(manifest)
    lines: list[str] = []
    for key, item in value.items():
        text = f"[{_rows(map(_compact, item))}]" if key in ("tensors", "parts") else _compact(item)
        lines.append(f" {json.dumps(key)}: {text}")
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
        **_optional(manifest),
        **({"folder": manifest.folder} if manifest.folder else {}),
        "tensors": [tensor_value(tensor) for tensor in manifest.tensors.values()],
        "piece_bytes": manifest.piece_bytes,
        "index": {"bytes": manifest.index.num_bytes, "digest": manifest.index.digest},
        "parts": [
            {
                "bytes": part.num_bytes,
                "digest": part.digest,
                "num_files": part.num_files,
                "data_bytes": part.data_bytes,
            }
            for part in manifest.parts
        ],
    }
    return {**value, "manifest_digest": content_digest(value)}


def _optional(manifest: Manifest) -> dict[str, Any]:
    """The fields that a reader may do without. Releases before them ignore them."""
    values = {
        "saved_at": None if manifest.saved_at is None else manifest.saved_at.strftime(TIME),
        "metrics": dict(manifest.point.metrics),
        "keep": manifest.keep.to_json(),
    }
    return {name: value for name, value in values.items() if value}


def tensor_value(info: TensorInfo) -> dict[str, Any]:
    return {"name": info.name, "shape": list(info.shape), "dtype": info.dtype, "spec": info.spec}


def _rows(rows: Iterable[str]) -> str:
    text = ",\n  ".join(rows)
    return f"\n  {text}" if text else ""


def _compact(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
