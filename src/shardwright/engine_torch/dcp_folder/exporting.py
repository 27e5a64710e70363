"""A checkpoint becomes a folder that ``torch.distributed.checkpoint.load`` reads on any sharding, written by PyTorch's own writer.

PyTorch's writer keeps what it has written of a file in memory. So boxes are given to it as if many ranks had them: a file for
some of them at a time.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from shardwright.checkpoint import Checkpoint, open_newest
from shardwright.checkpoint.folder.new_folder import new_folder, require_new
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.dcp.plan import chunk_of
from shardwright.engine_torch.dcp.saving import place_of
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.shards import tensor_of
from shardwright.runs.own_program.conversion import RECORD, Progress, counted, record_of, unseen
from shardwright.runs.own_program.entries import StatePath, entries_of
from shardwright.runs.own_program.values import Scalar
from shardwright.storage.url import Place

CHUNK_BYTES = 64 << 20
"""The largest chunk, but for one row of a larger tensor."""
FILE_BYTES = 256 << 20
"""The chunks of one file, which the writer has in memory."""


def export_folder(directory: Place, to: Path, progress: Progress = unseen) -> dict[str, Any]:
    """Write the newest checkpoint of a folder, or the one of ``directory``, and return what was written as JSON values.

    Raises InputError for a ``to`` that exists, for two entries of one name and for what cannot be written; CheckpointError and
    DamagedError for a checkpoint that cannot be read. Then nothing is left.
    """
    require_new(to)
    checkpoint = open_newest(directory)
    entries = entries_of(checkpoint)
    names = _names([*entries.tensors.values(), *entries.again, *entries.values, (RECORD,)])
    fqns = {name: names[path] for name, path in entries.tensors.items()}
    # PyTorch's own load needs a tied tensor under each of its names.
    tensors = {fqns[name]: name for name in checkpoint.tensors}
    tensors |= {names[path]: name for path, name in entries.again.items()}
    values = {names[path]: value for path, value in entries.values.items()}
    values[RECORD] = record_of(checkpoint, lambda name: fqns[name]).text()
    total = sum(prod(one.shape) * DTYPES[one.dtype].num_bytes for one in map(checkpoint.tensor, tensors.values()))
    planner = _Planner(checkpoint, tensors, values, counted(progress, total))
    plans = list(_plans(checkpoint, tensors, values))
    with new_folder(to) as folder:
        writer = _Writer(folder, str(os.path.abspath(to)))
        plans, metadata = create_default_global_save_plan(writer.prepare_global_plan(plans))
        results = [writer.write_data(plan, planner).wait() for plan in plans]
        writer.finish(replace(metadata, planner_data={name: path for path, name in names.items()}), results)
    return {
        "folder": str(to),
        "from": str(checkpoint.directory),
        "target": "dcp",
        "step": checkpoint.point.step,
        "num_tensors": len(tensors),
        "num_files": len(plans),
        "bytes": total,
        "values": [name for name in values if name != RECORD],
    }


class _Writer(FileSystemWriter):
    """Says of the folder the name that it will have."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder)
        self._name = name

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self._name, save_id=self.save_id)


class _Planner(DefaultSavePlanner):
    """Reads the elements of a chunk when they are written."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        tensors: Mapping[str, str],
        values: Mapping[str, Any],
        count: Callable[[int], None],
    ) -> None:
        super().__init__()
        self._checkpoint, self._tensors, self._values, self._count = checkpoint, tensors, values, count

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        name = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            return self.transform_object(write_item, self._values[name])
        if name in self._values:
            return _tensor(self._values[name])
        info = self._checkpoint.tensors[self._tensors[name]]
        box = place_of(write_item)[1]
        array = self._checkpoint.read_box(info.name, box, raw=True)
        self._count(array.nbytes)
        return tensor_of(array, torch_dtype(info.dtype))


def _names(paths: Sequence[StatePath]) -> dict[StatePath, str]:
    """The flattened name of each path. Raises InputError for two of one name."""
    found: dict[str, StatePath] = {}
    for path in paths:
        name = ".".join(map(str, path))
        if name in found:
            raise InputError(f"two entries would be called '{name}': {list(found[name])} and {list(path)}.")
        found[name] = path
    return {path: name for name, path in found.items()}


def _plans(checkpoint: Checkpoint, tensors: Mapping[str, str], values: Mapping[str, Any]) -> Iterator[SavePlan]:
    """What each file has: about ``FILE_BYTES`` of chunks. The values are in the first one."""
    items = [_value_item(name, value) for name, value in values.items()]
    num_bytes = 0
    for there, here in tensors.items():
        info = checkpoint.tensors[here]
        width = DTYPES[info.dtype].num_bytes
        properties = TensorProperties(dtype=torch_dtype(info.dtype))
        for box in _chunks(checkpoint, here, width):
            data = TensorWriteData(chunk=chunk_of(box), properties=properties, size=torch.Size(info.shape))
            size = box.size * width
            if items and num_bytes + size > FILE_BYTES:
                yield SavePlan(items)
                items, num_bytes = [], 0
            items.append(WriteItem(index=MetadataIndex(there, box.start), type=WriteItemType.SHARD, tensor_data=data))
            num_bytes += size
    if items:
        yield SavePlan(items)


def _chunks(checkpoint: Checkpoint, name: str, width: int) -> Iterator[Box]:
    """The stored boxes of a tensor in blocks of rows. A tensor without elements is one chunk: DCP needs one of each."""
    shape = checkpoint.tensors[name].shape
    for box in checkpoint.boxes(name) or (Box.whole(shape),):
        if not box.start or box.size * width <= CHUNK_BYTES:
            yield box
            continue
        rows = max(1, CHUNK_BYTES // (prod(box.shape[1:]) * width))
        for first in range(box.start[0], box.stop[0], rows):
            yield Box((first, *box.start[1:]), (min(first + rows, box.stop[0]), *box.stop[1:]))


def _value_item(name: str, value: Any) -> WriteItem:
    index = MetadataIndex(name)
    if not isinstance(value, Scalar):
        return WriteItem(index=index, type=WriteItemType.BYTE_IO)
    # As PyTorch has it in an optimizer's state: a tensor without dims.
    nothing = torch.Size(())
    data = TensorWriteData(chunk=chunk_of(Box((), ())), properties=TensorProperties(_tensor(value).dtype), size=nothing)
    return WriteItem(index=MetadataIndex(name, ()), type=WriteItemType.SHARD, tensor_data=data)


def _tensor(value: Scalar) -> torch.Tensor:
    return torch.tensor(value.value, dtype=torch_dtype(value.dtype))
