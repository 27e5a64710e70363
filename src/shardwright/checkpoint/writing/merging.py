"""Merges what all processes have written in a save: their part files become the index and the manifest."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime

from shardwright.checkpoint.format.arrays import MAX_BYTES
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.fields import parse_json
from shardwright.checkpoint.format.index import index_bytes, index_of
from shardwright.checkpoint.format.manifest import (
    INDEX_NAME,
    Manifest,
    RunPoint,
    StoredIndex,
    StoredPart,
    TensorInfo,
    tensor_value,
)
from shardwright.checkpoint.format.part import InfoTable, Part, declared_name, part_name, read_part
from shardwright.checkpoint.format.pieces import digest_of
from shardwright.checkpoint.format.read_manifest import read_tensor
from shardwright.checkpoint.retention.rules import Retention
from shardwright.storage.files import each, read_settled, write_durable
from shardwright.storage.url import Place


def declared_bytes(tensors: Sequence[TensorInfo]) -> bytes:
    """The tensors that one process declares, as JSON. Equal for two processes if and only if they declare the same."""
    return json.dumps([tensor_value(info) for info in tensors], separators=(",", ":")).encode()


def merged(
    directory: Place, final: Place, point: RunPoint, num_processes: int, *, saved_at: datetime, keep: Retention
) -> Manifest:
    """Writes the index of a save, durably, and returns its manifest.

    Raises CheckpointError if the part of a process is missing, if processes do not declare the same tensors (SW504), and if the
    boxes do not cover every tensor exactly once (SW501).
    """
    first = _read(directory, final, declared_name(0), 0)
    infos = _infos(directory / declared_name(0), first)
    table = InfoTable.of(infos)
    parts: list[Part] = []
    stored: list[StoredPart] = []
    sizes: list[int] = []

    def of(process: int) -> tuple[bytes, bytes]:
        declared = first if process == 0 else _read(directory, final, declared_name(process), process)
        return declared, _read(directory, final, part_name(process), process)

    for process, (declared, data) in enumerate(each(directory, of, range(num_processes))):
        if declared != first:
            other = _infos(directory / declared_name(process), declared)
            raise CheckpointError(
                f"{final}: process {process} and process 0 do not have the same tensors: {_difference(infos, other)}. "
                f"Every process must run the same program with the same options.",
                code="SW504",
            )
        part, piece_bytes = read_part(directory / part_name(process), data, process, table)
        parts.append(part)
        sizes.append(piece_bytes)
        stored.append(
            StoredPart(
                num_bytes=len(data),
                digest=digest_of(data),
                num_files=len(part.files),
                data_bytes=sum(file.num_bytes for file in part.files),
            )
        )
    if len(set(sizes)) > 1:
        raise CheckpointError(f"{final}: processes have pieces of different sizes: {sorted(set(sizes))} bytes.")
    index = index_bytes(index_of(final, infos, parts))
    write_durable(directory / INDEX_NAME, index)
    return Manifest(
        point=point,
        tensors={info.name: info for info in infos},
        piece_bytes=sizes[0],
        index=StoredIndex(num_bytes=len(index), digest=digest_of(index)),
        parts=tuple(stored),
        saved_at=saved_at,
        keep=keep,
    )


def _read(directory: Place, final: Place, name: str, process: int) -> bytes:
    try:
        return read_settled(directory / name, MAX_BYTES)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{final}: process {process} has not written its part, so this checkpoint is not committed."
        ) from error


def _infos(path: Place, data: bytes) -> tuple[TensorInfo, ...]:
    return tuple(read_tensor(item) for item in parse_json(data, path).items())


def _difference(first: Sequence[TensorInfo], other: Sequence[TensorInfo]) -> str:
    found, needed = {info.name: info for info in other}, {info.name: info for info in first}
    for name in (*needed, *found):
        if found.get(name) != needed.get(name):
            return f"'{name}' is {_described(found.get(name))} there and {_described(needed.get(name))} in process 0"
    return "their order is different"


def _described(info: TensorInfo | None) -> str:
    return f"{info.dtype} {info.shape} {info.spec!r}" if info else "missing"
