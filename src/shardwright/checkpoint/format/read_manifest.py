"""Reads a manifest and validates it: every field, and boxes and files against each other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.fields import MOST, Field, read_json
from shardwright.checkpoint.format.manifest import (
    FILE_NAME,
    FORMAT,
    VERSION,
    Manifest,
    RunPoint,
    StoredBox,
    StoredFile,
    StoredTensor,
    TensorInfo,
    content_digest,
)
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.coverage import coverage
from shardwright.core.findings.nearest import did_you_mean

SAFE_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.safetensors")
HEX_128 = re.compile(r"[0-9a-f]{32}")

NO_MEMORY = "there is not enough memory"
MAX_DIMS = 64
"""What NumPy holds."""
MAX_BOX_BYTES = 1 << 39
"""512 GiB: one process writes a box from one array."""
MAX_HEADER_BYTES = 8 + 100_000_000
"""What the safetensors library reads."""
MAX_DEPTH = 64
"""How deep lists and mappings may be nested in ``metadata``."""


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint directory, proven self-consistent. Reads no data file.

    Fields are checked first and the manifest's own digest last, so that the error for a damaged or edited manifest is
    as specific as possible. Raises CheckpointError with file, path, found and needed; DamagedError if its
    digest proves that it is not what was written.
    """
    path = directory / FILE_NAME
    try:
        top = read_json(path)
    except FileNotFoundError as error:
        raise DamagedError(
            f"{directory}: there is no {FILE_NAME}, so this is not a checkpoint. "
            f"Give the directory of one step, as in OUT/checkpoints/step-00000010."
        ) from error
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else NO_MEMORY
        raise CheckpointError(f"{path}: cannot be read: {reason}.") from error
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    try:
        _check_format(top)
        return _validated(path, top)
    except CheckpointError as error:
        if _may_be_as_written(top):
            raise
        raise DamagedError(error.message, code=error.code) from error
    except RecursionError as error:
        raise CheckpointError(f"{path}: its values are nested too deeply.") from error
    except MemoryError as error:
        raise CheckpointError(f"{path}: cannot be read: {NO_MEMORY}.") from error


def _validated(path: Path, top: Field) -> Manifest:
    point = _point(top)
    files = tuple(read_file_field(item) for item in top["files"].items())
    sizes = {file.name: file for file in files}
    if len(sizes) != len(files):
        raise top["files"].error("a file is listed twice.")
    tensors: dict[str, StoredTensor] = {}
    for item in top["tensors"].items():
        tensor = read_tensor_field(item)
        if tensor.info.name in tensors:
            raise item.error(f"the tensor '{tensor.info.name}' is listed twice.")
        check_cover(path, tensor)
        tensors[tensor.info.name] = tensor
    _check_bytes_of_files(path, files, tuple(tensors.values()))
    if not _digest_matches(top):
        raise CheckpointError(
            f"{path}: its content does not match its own digest: it was damaged or edited after it was written. "
            f"Restore it from a copy, or resume from another checkpoint."
        )
    return Manifest(point=point, files=files, tensors=tensors)


def _digest_matches(top: Field) -> bool:
    content = top.mapping()
    try:
        return content.get("manifest_digest") == content_digest(content)
    except RecursionError:
        return False


def _may_be_as_written(top: Field) -> bool:
    """Whether an invalid manifest may be undamaged: its digest matches, or another release has written it."""
    if not isinstance(top.value, dict):
        return False
    return top.value.get("version") not in (None, VERSION) or _digest_matches(top)


def check_cover(place: Path, tensor: StoredTensor) -> None:
    """Raises CheckpointError (SW501) unless the boxes, all within the shape, cover the tensor exactly once."""
    boxes = [stored.box for stored in tensor.boxes]
    found = coverage(boxes, tensor.info.shape, limit=8)
    if found.exact:
        return
    faults = [f"no box covers [{hole}]" for hole in found.holes]
    for overlap in found.overlaps:
        first, second, *_ = overlap.indices
        faults.append(f"the boxes [{boxes[first]}] and [{boxes[second]}] both cover [{overlap.region}]")
    shown = "; ".join([*faults[:4], *(["and more"] if found.more or len(faults) > 4 else [])])
    raise CheckpointError(
        f"{place}: tensor '{tensor.info.name}' of shape {tensor.info.shape} is not covered exactly once by its boxes: {shown}.",
        code="SW501",
    )


def read_tensor_field(item: Field) -> StoredTensor:
    """One tensor with its boxes, from a manifest or from the part file of one process."""
    item = item.labelled(f"tensor '{item['name'].text()}'")
    dtype_name = item["dtype"].text()
    if dtype_name not in DTYPES:
        raise item["dtype"].error(f"'{dtype_name}' is not a dtype of this format. {did_you_mean(dtype_name, DTYPES)}")
    info = TensorInfo(
        name=item["name"].text(),
        shape=_shape(item["shape"], DTYPES[dtype_name].num_bytes),
        dtype=dtype_name,
        spec=item["spec"].text(),
    )
    return StoredTensor(info=info, boxes=tuple(_box(box, info) for box in item["boxes"].items()))


def read_file_field(item: Field) -> StoredFile:
    name = item["name"].text()
    if not SAFE_FILE.fullmatch(name):
        raise item["name"].error(f"'{name}' is not the name of a .safetensors file next to the manifest.")
    return StoredFile(
        name=name,
        num_bytes=item["bytes"].integer(),
        header_bytes=_at_most(item["header_bytes"], MAX_HEADER_BYTES, minimum=8),
        header_digest=_digest(item["header_digest"]),
    )


def _shape(item: Field, element_bytes: int) -> tuple[int, ...]:
    """A shape that an array may have: also one with a dim of size 0."""
    shape = item.integers()
    if len(shape) > MAX_DIMS:
        raise item.error(f"found {len(shape):,} dims, needed at most {MAX_DIMS}.", "SW501")
    if (num_bytes := element_bytes * prod(size for size in shape if size)) > MOST:
        raise item.error(f"found {shape}, which is {num_bytes:,} bytes, needed at most {MOST:,}.", "SW501")
    return shape


def _at_most(item: Field, most: int, minimum: int = 0) -> int:
    if (value := item.integer(minimum)) > most:
        raise item.error(f"found {value:,}, needed at most {most:,}.")
    return value


def _box(item: Field, info: TensorInfo) -> StoredBox:
    start, stop = item["start"].integers(len(info.shape)), item["stop"].integers(len(info.shape))
    if not all(a < b <= size for a, b, size in zip(start, stop, info.shape, strict=True)):
        raise item.error(f"from {start} to {stop} is not a box within the shape {info.shape}.", "SW501")
    box = Box(start, stop)
    num_bytes, needed = _at_most(item["bytes"], MAX_BOX_BYTES), box.size * DTYPES[info.dtype].num_bytes
    if num_bytes != needed:
        raise item["bytes"].error(f"found {num_bytes}, needed {needed} for [{box}] of {info.dtype}.", "SW501")
    return StoredBox(
        box=box,
        file=item["file"].text(),
        key=item["key"].text(),
        offset=item["offset"].integer(),
        num_bytes=num_bytes,
        digest=_digest(item["digest"]),
    )


def _digest(item: Field) -> str:
    if not HEX_128.fullmatch(item.text()):
        raise item.error(f"'{item.text()}' is not a digest of 32 hex digits.")
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


def _check_bytes_of_files(path: Path, files: Sequence[StoredFile], tensors: Sequence[StoredTensor]) -> None:
    """Checks that every byte of every file belongs to its header or to exactly one box: a digest covers each byte."""
    in_file: dict[str, list[tuple[StoredBox, str]]] = {file.name: [] for file in files}
    for tensor in tensors:
        for stored in tensor.boxes:
            if stored.file not in in_file:
                raise CheckpointError(
                    f"{path}: tensor '{tensor.info.name}', box [{stored.box}]: its file '{stored.file}' is not in the list of files."
                )
            in_file[stored.file].append((stored, tensor.info.name))
    for file in files:
        end = file.header_bytes
        for stored, name in sorted(in_file[file.name], key=lambda pair: pair[0].offset):
            if stored.offset != end:
                raise CheckpointError(
                    f"{path}: tensor '{name}', box [{stored.box}]: starts at byte {stored.offset} of '{file.name}', "
                    f"needed {end}, where the bytes before it end."
                )
            end += stored.num_bytes
        if end != file.num_bytes:
            raise CheckpointError(
                f"{path}: file '{file.name}': header and boxes have {end} bytes in total, the listed size is {file.num_bytes}."
            )
