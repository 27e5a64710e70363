"""The part file of one process in a save: a list of the boxes it has written. Part files are merged into the manifest."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.fields import read_json
from shardwright.checkpoint.format.manifest import (
    StoredBox,
    StoredFile,
    StoredTensor,
    TensorInfo,
    file_value,
    tensor_value,
)
from shardwright.checkpoint.format.read_manifest import read_file_field, read_tensor_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All tensors of the state, as every process declares them, and the files and boxes of one process."""

    infos: tuple[TensorInfo, ...]
    files: tuple[StoredFile, ...] = ()
    boxes: tuple[tuple[str, StoredBox], ...] = field(default=())

    def with_file(self, file: StoredFile, boxes: Sequence[tuple[str, StoredBox]]) -> Part:
        return Part(infos=self.infos, files=(*self.files, file), boxes=(*self.boxes, *boxes))

    def tensors(self) -> tuple[StoredTensor, ...]:
        """Every declared tensor with the boxes of this process, often none."""
        boxes: dict[str, list[StoredBox]] = {info.name: [] for info in self.infos}
        for name, stored in self.boxes:
            boxes[name].append(stored)
        return tuple(StoredTensor(info=info, boxes=tuple(boxes[info.name])) for info in self.infos)


def part_name(process: int) -> str:
    return f"part-{process:05d}.json"


def write_part_file(directory: Path, process: int, part: Part) -> None:
    """Writes the part file of one process, with the names of its data files, and makes it durable."""
    value = {
        "files": [file_value(file) for file in part.files],
        "tensors": [tensor_value(tensor) for tensor in part.tensors()],
    }
    # Renamed when complete: process 0 must never read a partly written list.
    temporary = directory / f"{part_name(process)}.tmp"
    with temporary.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value, separators=(",", ":")))
        file.flush()
        os.fsync(file.fileno())
    os.rename(temporary, directory / part_name(process))


def read_part(directory: Path, final: Path, process: int) -> Part:
    """The part of one process. Raises CheckpointError, naming the process, if its file is missing."""
    try:
        top = read_json(directory / part_name(process))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{final}: process {process} has not written its part, so this checkpoint is not committed."
        ) from error
    tensors = [read_tensor_field(item) for item in top["tensors"].items()]
    return Part(
        infos=tuple(tensor.info for tensor in tensors),
        files=tuple(read_file_field(item) for item in top["files"].items()),
        boxes=tuple((tensor.info.name, stored) for tensor in tensors for stored in tensor.boxes),
    )


def merge(final: Path, all_parts: Sequence[Part]) -> tuple[tuple[StoredFile, ...], tuple[StoredTensor, ...]]:
    """All files, and every tensor with the boxes of all processes in the order of their starts."""
    first = all_parts[0]
    for process, part in enumerate(all_parts):
        if part.infos != first.infos:
            raise CheckpointError(
                f"{final}: process {process} and process 0 do not have the same tensors: {_difference(first, part)}. "
                f"Every process must run the same program with the same options.",
                code="SW504",
            )
    merged = Part(
        infos=first.infos,
        files=tuple(file for part in all_parts for file in part.files),
        boxes=tuple(sorted((pair for part in all_parts for pair in part.boxes), key=lambda pair: pair[1].box)),
    )
    return merged.files, merged.tensors()


def _difference(first: Part, other: Part) -> str:
    found, needed = {info.name: info for info in other.infos}, {info.name: info for info in first.infos}
    for name in (*needed, *found):
        if found.get(name) != needed.get(name):
            return f"'{name}' is {_described(found.get(name))} there and {_described(needed.get(name))} in process 0"
    return "their order is different"


def _described(info: TensorInfo | None) -> str:
    return f"{info.dtype} {info.shape} {info.spec!r}" if info else "missing"
