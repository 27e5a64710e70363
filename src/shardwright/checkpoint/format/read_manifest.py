"""Reads a manifest and validates it: every field, and its own digest."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from math import prod
from typing import Any

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import MISSING, CheckpointError, DamagedError
from shardwright.checkpoint.format.fields import MAX_JSON_BYTES, MOST, Field, parse_json
from shardwright.checkpoint.format.manifest import (
    FILE_NAME,
    FORMAT,
    TIME,
    VERSION,
    Manifest,
    RunPoint,
    StoredIndex,
    StoredPart,
    TensorInfo,
    content_digest,
)
from shardwright.checkpoint.format.pieces import MAX_PIECE_BYTES, digest_of
from shardwright.checkpoint.format.proof import proven
from shardwright.checkpoint.retention.rules import LOSS, Retention
from shardwright.core.findings.nearest import did_you_mean
from shardwright.storage.files import read_regular
from shardwright.storage.url import Place

HEX_128 = re.compile(r"[0-9a-f]{32}")
ATTEMPT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{8}")
"""The folder of one attempt to save a step in an object store: of which run, and which attempt."""

NO_MEMORY = "there is not enough memory"
MAX_DIMS = 64
"""What NumPy holds."""
MAX_DEPTH = 64
"""How deep lists and mappings may be nested in ``metadata``."""


def read_manifest(directory: Place) -> Manifest:
    """The manifest of a checkpoint directory, proven self-consistent. Reads no other file.

    Fields are checked first and the manifest's own digest last, so that the error for a damaged or edited manifest is
    as specific as possible. Raises CheckpointError with file, path, found and needed; DamagedError if its
    digest proves that it is not what was written.
    """
    return proven(directory / FILE_NAME, lambda: _read(directory))


def _read(directory: Place) -> Manifest:
    path = directory / FILE_NAME
    try:
        data = read_regular(path, MAX_JSON_BYTES)
    except FileNotFoundError as error:
        raise DamagedError(
            f"{directory}: there is no {FILE_NAME}, so this is not a checkpoint. "
            f"Give the directory of one step, as in OUT/checkpoints/step-00000010.",
            read=MISSING,
        ) from error
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else NO_MEMORY
        raise CheckpointError(f"{path}: cannot be read: {reason}.") from error
    try:
        top = parse_json(data, path)
    except MemoryError as error:
        raise CheckpointError(f"{path}: cannot be read: {NO_MEMORY}.") from error
    except CheckpointError as error:
        raise DamagedError(str(error), read=digest_of(data)) from error
    try:
        _check_format(top)
        return _validated(path, top)
    except CheckpointError as error:
        if _may_be_as_written(top):
            raise
        raise DamagedError(error.message, code=error.code, read=digest_of(data)) from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: its values are nested too deeply.") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: cannot be read: {NO_MEMORY}.") from error


def read_tensor(item: Field) -> TensorInfo:
    """One tensor, from a manifest or from what one process declares."""
    item = item.labelled(f"tensor '{item['name'].text()}'")
    dtype_name = item["dtype"].text()
    if dtype_name not in DTYPES:
        raise item["dtype"].error(f"'{dtype_name}' is not a dtype of this format. {did_you_mean(dtype_name, DTYPES)}")
    shape = item["shape"].integers()
    if len(shape) > MAX_DIMS:
        raise item["shape"].error(f"found {len(shape):,} dims, needed at most {MAX_DIMS}.", "SW501")
    # Also without the empty dims, so that no product of some of the dims exceeds 64 bits.
    num_bytes = prod(size for size in shape if size) * DTYPES[dtype_name].num_bytes
    if num_bytes > MOST:
        raise item["shape"].error(f"found {shape}, which is {num_bytes:,} bytes, needed at most {MOST:,}.", "SW501")
    return TensorInfo(name=item["name"].text(), shape=shape, dtype=dtype_name, spec=item["spec"].text())


def _validated(path: Place, top: Field) -> Manifest:
    point = _point(top)
    tensors: dict[str, TensorInfo] = {}
    for item in top["tensors"].items():
        info = read_tensor(item)
        if info.name in tensors:
            raise item.error(f"the tensor '{info.name}' is listed twice.")
        tensors[info.name] = info
    piece_bytes = top["piece_bytes"].integer(minimum=1)
    if piece_bytes > MAX_PIECE_BYTES:
        raise top["piece_bytes"].error(f"found {piece_bytes:,}, needed at most {MAX_PIECE_BYTES:,}.")
    manifest = Manifest(
        point=point,
        tensors=tensors,
        piece_bytes=piece_bytes,
        index=StoredIndex(num_bytes=top["index"]["bytes"].integer(), digest=_digest(top["index"]["digest"])),
        parts=tuple(_part(item) for item in top["parts"].items()),
        folder=_folder(top["folder"]) if "folder" in top.mapping() else "",
        saved_at=_time(top["saved_at"]) if "saved_at" in top.mapping() else None,
        keep=_rules(top["keep"]) if "keep" in top.mapping() else Retention(),
    )
    if not _digest_matches(top):
        raise CheckpointError(
            f"{path}: its content does not match its own digest: it was damaged or edited after it was written. "
            f"Restore it from a copy, or resume from another checkpoint."
        )
    return manifest


def _part(item: Field) -> StoredPart:
    return StoredPart(
        num_bytes=item["bytes"].integer(),
        digest=_digest(item["digest"]),
        num_files=item["num_files"].integer(),
        data_bytes=item["data_bytes"].integer(),
    )


def _digest_matches(top: Field) -> bool:
    content = top.mapping()
    return content.get("manifest_digest") == content_digest(content)


def _may_be_as_written(top: Field) -> bool:
    """Whether an invalid manifest may be undamaged: its digest matches, or another release has written it."""
    if not isinstance(top.value, dict):
        return False
    return top.value.get("version") not in (None, VERSION) or _digest_matches(top)


def _digest(item: Field) -> str:
    if not HEX_128.fullmatch(item.text()):
        raise item.error(f"'{item.text()}' is not a digest of 32 hex digits.")
    return item.text()


def _folder(item: Field) -> str:
    # No other folder: a manifest that anybody may have written names no file elsewhere.
    if not ATTEMPT.fullmatch(item.text()):
        raise item.error(f"'{item.text()}' is not a folder of a save, as 5f0c9a17-81d2e044.")
    return item.text()


def _check_format(top: Field) -> None:
    found = top["format"].text()
    if found != FORMAT:
        raise top["format"].error(f"found '{found}', needed '{FORMAT}'. This file was not written by Shardwright.")
    version = top["version"].integer(minimum=1)
    if version != VERSION:
        raise top["version"].error(
            f"found {version}, and this release reads version {VERSION}. Read it with the release that wrote it."
        )


def _point(top: Field) -> RunPoint:
    mesh = top["mesh"]
    return RunPoint(
        step=top["step"].integer(),
        seed=top["seed"].integer(minimum=None),
        data_position=top["data_position"].integer(),
        model=top["model"].text(),
        layout_name=top["layout"]["name"].text(),
        layout_text=top["layout"]["text"].text(),
        mesh={axis: mesh[axis].integer(minimum=1) for axis in mesh.mapping()},
        metadata=_metadata(top["metadata"]),
        metrics=_metrics(top["metrics"]) if "metrics" in top.mapping() else {},
    )


def _metrics(item: Field) -> dict[str, float]:
    return {name: item[name].number() for name in item.mapping()}


def _time(item: Field) -> datetime:
    try:
        return datetime.strptime(item.text(), TIME).replace(tzinfo=UTC)
    except ValueError:
        raise item.error(f"'{item.text()}' is not a time, as 2026-03-01T08:15:42Z.") from None


def _rules(item: Field) -> Retention:
    """The rules of a run. Those of a later release that are not known here are left out."""
    known = item.mapping()

    def number(name: str) -> int | None:
        return item[name].integer(minimum=1) if name in known else None

    return Retention(
        newest=number("newest"),
        every_steps=number("every_steps"),
        every_hours=number("every_hours"),
        best=number("best"),
        best_of=item["best_of"].text() if "best_of" in known else LOSS,
    )


def _metadata(item: Field) -> dict[str, Any]:
    level: list[Any] = [item.mapping()]
    for _ in range(MAX_DEPTH):
        level = [
            each
            for value in level
            for each in (value.values() if isinstance(value, dict) else value)
            if isinstance(each, (dict, list))
        ]
    if level:
        raise item.error(f"lists and mappings are nested more than {MAX_DEPTH} deep.")
    return item.mapping()
