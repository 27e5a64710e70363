"""A folder of ``torch.distributed.checkpoint`` becomes a checkpoint: each chunk is a box. One chunk at a time is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoint import CheckpointError, OwnedBox, RunPoint, TensorInfo, save_checkpoint
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import chosen
from shardwright.engine_torch.dcp_folder.elements import read_chunk, read_value
from shardwright.engine_torch.dcp_folder.folder import DcpFolder, open_folder
from shardwright.engine_torch.dcp_folder.program import program_of
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.shards import tensor_of
from shardwright.runs.own_program.conversion import (
    RECORD,
    Progress,
    counted,
    point_of,
    read_record,
    recorded,
    refuse,
    step_of,
    unseen,
)
from shardwright.runs.own_program.entries import PATHS
from shardwright.runs.own_program.store import STATE_DICT, TORCH, VALUES, program_point
from shardwright.runs.own_program.values import Scalar, encoded, with_keys
from shardwright.storage.url import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What is written. ``tensors``: each by its name in the folder. ``form``: how people call the result."""

    tensors: Mapping[str, TensorInfo]
    point: RunPoint
    form: str


def import_folder(
    folder: Path,
    out: Place,
    *,
    step: int | None = None,
    module: str | None = None,
    optimizer: str | None = None,
    leave_out: Sequence[str] = (),
    trusts: bool = False,
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Write the checkpoint of a step under ``out``, and return what was written as JSON values.

    ``module``, ``optimizer``: the keys of the state dict that ``get_state_dict`` returned; the result is then one of
    ``engine_torch.load``. Else it is a state dict, with the flattened names. ``step``: by default, the number at the end of the
    folder's name. ``trusts``: pickles are executed.

    Raises InputError and CheckpointError; then nothing is written: a folder that is incomplete or damaged, a pickle that names
    other classes, what no checkpoint holds and is not left out, a step that exists.
    """
    if optimizer is not None and module is None:
        raise InputError("--optimizer is for a module, which --module gives.")
    found = open_folder(folder, trusts=trusts)
    names = [*found.tensors, *found.values, *found.other]
    without = chosen(names, leave_out, "--leave-out")
    job = _job(found, step, module, optimizer, without)
    stored = {name: found.tensors[name] for name in job.tensors}
    total = sum(one.num_bytes for one in stored.values())
    unverified: list[str] = []
    directory = save_checkpoint(
        out, job.point, list(job.tensors.values()), _boxes(found, job.tensors, counted(progress, total), unverified)
    )
    return {
        "directory": str(directory),
        "from": str(folder),
        "source": "dcp",
        "form": job.form,
        "step": job.point.step,
        "num_tensors": len(stored),
        "num_boxes": sum(len(one.chunks) for one in stored.values()),
        "bytes": total,
        "dtypes": list(dict.fromkeys(one.dtype for one in stored.values())),
        "values": [name for name in found.values if name not in without and name != RECORD],
        "left_out": sorted(without),
        "unverified": list(dict.fromkeys(unverified)),
        "pickles_executed": trusts,
    }


def _job(
    found: DcpFolder, step: int | None, module: str | None, optimizer: str | None, without: frozenset[str]
) -> _Job:
    infos = {
        name: TensorInfo(name=name, shape=one.shape, dtype=one.dtype)
        for name, one in found.tensors.items()
        if name not in without
    }
    if RECORD in found.values and RECORD not in without:
        if module is not None:
            raise InputError(
                f"{found.path}: shardwright has exported it, and its record says what it holds. Leave out --module, or leave the "
                f"record out with --leave-out {RECORD}."
            )
        record = read_record(str(found.path), read_value(found, RECORD))
        tensors = recorded(str(found.path), record, infos)
        return _Job(tensors=tensors, point=point_of(record, step), form="checkpoint that was exported")
    other = {name: why for name, why in found.other.items() if name not in without}
    refuse(
        found.path,
        "a checkpoint does not hold these tensors",
        [f"'{name}': {why}" for name, why in other.items()],
        "Leave them out with --leave-out NAME.",
    )
    values = {name: read_value(found, name) for name in found.values if name not in without}
    _require_json(found.path, values)
    paths = {name: path for name, path in found.paths.items() if name in infos or name in values}
    number = step_of(found.path, step)
    if module is None:
        flat = with_keys({name: encoded(value, f"'{name}'") for name, value in values.items()})
        kept = {name: list(path) for name, path in paths.items() if path != (name,)}
        point = program_point(number, "state dict", {PROGRAM: STATE_DICT, VALUES: flat, PATHS: kept})
        return _Job(tensors=infos, point=point, form="state dict")
    program = program_of(
        paths,
        {name: info.shape for name, info in infos.items()},
        values,
        lambda name: _scalar(found, name),
        module=module,
        optimizer=optimizer,
    )
    tensors = {
        there: TensorInfo(name=here, shape=infos[there].shape, dtype=infos[there].dtype)
        for there, here in program.tensors.items()
    }
    point = program_point(number, "module", {PROGRAM: TORCH, VALUES: program.values})
    return _Job(tensors=tensors, point=point, form="module" + (" and optimizer" if optimizer is not None else ""))


def _require_json(folder: Path, values: Mapping[str, Any]) -> None:
    lines: list[str] = []
    for name, value in values.items():
        try:
            encoded(value, f"'{name}'")
        except CheckpointError as error:
            lines.append(error.message.partition(":")[0])
    refuse(
        folder,
        "a checkpoint holds tensors, and values that JSON has",
        lines,
        "Leave them out with --leave-out NAME, and save what they consist of by your program.",
    )


def _scalar(found: DcpFolder, name: str) -> Scalar:
    stored = found.tensors[name]
    value = tensor_of(read_chunk(found, name, Box((), ()))[0], torch_dtype(stored.dtype)).item()
    return Scalar(value, stored.dtype)


def _boxes(
    found: DcpFolder, tensors: Mapping[str, TensorInfo], count: Callable[[int], None], unverified: list[str]
) -> Iterator[OwnedBox]:
    """The boxes of all chunks. ``unverified`` gets the name of each tensor that was read without a digest."""
    for there, info in tensors.items():
        for box in found.tensors[there].chunks:
            yield OwnedBox(name=info.name, box=box, array=_reader(found, there, box, count, unverified))


def _reader(
    found: DcpFolder, name: str, box: Box, count: Callable[[int], None], unverified: list[str]
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        array, verified = read_chunk(found, name, box)
        if not verified:
            unverified.append(name)
        count(array.nbytes)
        return array

    return read
