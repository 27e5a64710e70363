"""A folder of Orbax becomes a checkpoint of a pytree. Some chunks are in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from shardwright.checkpoint import CheckpointError, OwnedBox, RunPoint, TensorInfo, save_checkpoint
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.core.findings.patterns import chosen
from shardwright.engine_jax.orbax_folder.arrays import Reader, StoredArray
from shardwright.engine_jax.orbax_folder.folder import ARRAY_TYPES, OrbaxFolder, open_folder
from shardwright.engine_jax.own_program.store import KEYS, LEAVES
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
from shardwright.runs.own_program.entries import EMPTY, EMPTY_NODES, PATHS
from shardwright.runs.own_program.store import JAX, PROGRAM, VALUES, program_point
from shardwright.runs.own_program.values import encoded, with_keys
from shardwright.storage.url import Place

MOST_COMPRESSED = 4096
"""How many times larger than its files an array may be: more than the compression of zeros."""
FREE_BYTES = 1 << 30
"""What it may have in any case: arrays of zeros that are not stored at all."""


def import_folder(
    folder: Path,
    out: Place,
    *,
    step: int | None = None,
    leave_out: Sequence[str] = (),
    progress: Progress = unseen,
) -> dict[str, Any]:
    """Write the checkpoint of a step under ``out``, and return what was written as JSON values.

    Names are those that ``engine_jax.save`` gives the leaves of the tree. ``step``: by default, the number in the folder's path.

    Raises InputError and CheckpointError; then nothing is written: a folder that is incomplete or damaged, what no checkpoint
    holds and is not left out, a step that exists.
    """
    found = open_folder(folder, step)
    reader = Reader(found)
    names = [name for name, leaf in found.leaves.items() if leaf.kind not in EMPTY]
    without = chosen(names, leave_out, "--leave-out")
    kept = {name: leaf for name, leaf in found.leaves.items() if name not in without}
    unknown = [f"'{name}': {leaf.kind}" for name, leaf in kept.items() if leaf.kind not in KNOWN]
    refuse(found.path, "these leaves have types of their own", unknown, "Leave them out with --leave-out NAME.")
    arrays = {name: reader.array(leaf) for name, leaf in kept.items() if leaf.kind in ARRAY_TYPES}
    wrong = [f"'{name}': dtype {one.dtype}" for name, one in arrays.items() if one.dtype not in DTYPES]
    refuse(found.path, "a checkpoint does not hold these arrays", wrong, "Leave them out with --leave-out NAME.")
    _require_size(found, arrays)
    infos = {name: TensorInfo(name=name, shape=one.shape, dtype=one.dtype) for name, one in arrays.items()}
    point, tensors = _point(found, reader, infos, without, step)
    total = sum(arrays[name].num_bytes for name in tensors)
    boxes = {name: list(arrays[name].boxes()) for name in tensors}
    directory = save_checkpoint(
        out, point, list(tensors.values()), _owned(arrays, tensors, boxes, counted(progress, total))
    )
    return {
        "directory": str(directory),
        "from": str(found.path),
        "source": "orbax",
        "form": "pytree" if _record_in(found) is None else "checkpoint that was exported",
        "step": point.step,
        "num_tensors": len(tensors),
        "num_boxes": sum(map(len, boxes.values())),
        "bytes": total,
        "dtypes": list(dict.fromkeys(info.dtype for info in tensors.values())),
        "values": [name for name, leaf in kept.items() if leaf.kind in VALUE_TYPES],
        "left_out": sorted(without),
    }


VALUE_TYPES = ("scalar", "string")
KNOWN = frozenset((*ARRAY_TYPES, *VALUE_TYPES, *EMPTY))


def _point(
    found: OrbaxFolder, reader: Reader, infos: Mapping[str, TensorInfo], without: frozenset[str], step: int | None
) -> tuple[RunPoint, Mapping[str, TensorInfo]]:
    """The state of the checkpoint without tensors, and its tensors by their names in the folder."""
    exported = _record_in(found)
    if exported is not None:
        record = read_record(str(found.path), exported)
        return point_of(record, step), recorded(str(found.path), record, infos)
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    empty: list[Any] = []
    for name, leaf in found.leaves.items():
        if name in without:
            continue
        if leaf.kind == "scalar":
            values[name] = encoded(_scalar(reader.array(leaf), found, name), f"'{name}'")
        elif leaf.kind == "string":
            values[name] = encoded(reader.text(leaf), f"'{name}'")
        elif leaf.kind in EMPTY:
            empty.append([list(leaf.path), leaf.kind])
        elif leaf.key is not None:
            keys[name] = leaf.key
    # Numbers of lists, which a name does not tell from keys of mappings.
    paths = {
        name: list(leaf.path)
        for name, leaf in found.leaves.items()
        if (name in infos or name in values) and any(type(key) is int for key in leaf.path)
    }
    of_tree = {LEAVES: with_keys(values), KEYS: with_keys(keys), PATHS: with_keys(paths), EMPTY_NODES: empty}
    metadata = {PROGRAM: JAX, VALUES: of_tree}
    number = found.step if step is None and found.step is not None else step_of(found.path, step)
    return program_point(number, "pytree", metadata), infos


def _record_in(found: OrbaxFolder) -> Any:
    return found.custom.get(RECORD) if isinstance(found.custom, dict) else None


def _scalar(stored: StoredArray, found: OrbaxFolder, name: str) -> Any:
    if stored.shape:
        raise CheckpointError(f"{found.path}: '{name}' has shape {stored.shape}, and is said to be one number.")
    return stored.read(Box((), ())).item()


def _require_size(found: OrbaxFolder, arrays: Mapping[str, StoredArray]) -> None:
    """Raise CheckpointError for arrays that are larger than their files can be: chunks that are not stored would be zero."""
    most = MOST_COMPRESSED * sum(one.stat().st_size for one in found.path.rglob("*") if one.is_file()) + FREE_BYTES
    for name, one in arrays.items():
        size = max(one.num_bytes, prod(one.chunk) * DTYPES[one.dtype].num_bytes)
        if size > most:
            raise CheckpointError(
                f"{found.path}: '{name}' of shape {one.shape} in chunks of {one.chunk} has {size:,} bytes, and the files of the "
                f"folder hold at most {most:,}."
            )


def _owned(
    arrays: Mapping[str, StoredArray],
    tensors: Mapping[str, TensorInfo],
    boxes: Mapping[str, Sequence[Box]],
    count: Callable[[int], None],
) -> Iterator[OwnedBox]:
    for there, info in tensors.items():
        for box in boxes[there]:
            yield OwnedBox(name=info.name, box=box, array=_reader(arrays[there], box, count))


def _reader(stored: StoredArray, box: Box, count: Callable[[int], None]) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        array = stored.read(box)
        count(array.nbytes)
        return array

    return read
