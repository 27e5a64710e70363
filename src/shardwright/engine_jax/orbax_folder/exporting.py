"""A checkpoint becomes a folder that Orbax restores, written by Orbax itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.checkpoint import Checkpoint, CheckpointError, open_newest
from shardwright.checkpoint.folder.new_folder import new_folder, require_new
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError, ShardwrightError
from shardwright.engine_jax.orbax_folder.writing import BoxedArray, registry
from shardwright.runs.own_program.conversion import RECORD, Progress, counted, record_of, unseen
from shardwright.runs.own_program.entries import Entries, StatePath, entries_of, nested
from shardwright.runs.own_program.values import Scalar
from shardwright.storage.url import Place

MOST_INTEGER = 1 << 63


def export_folder(directory: Place, to: Path, progress: Progress = unseen) -> dict[str, Any]:
    """Write the newest checkpoint of a folder, or the one of ``directory``, and return what was written as JSON values.

    Raises InputError for a ``to`` that exists, for what Orbax cannot hold and for what cannot be written; CheckpointError and
    DamagedError for a checkpoint that cannot be read. Then nothing is left.
    """
    import orbax.checkpoint as ocp

    require_new(to)
    checkpoint = open_newest(directory)
    entries = entries_of(checkpoint)
    total = sum(prod(one.shape) * DTYPES[one.dtype].num_bytes for one in checkpoint.tensors.values())
    tree = _tree(checkpoint, entries, counted(progress, total))
    record = record_of(checkpoint, lambda name: "/".join(map(str, entries.tensors[name]))).text()
    with new_folder(to) as folder:
        saved = Path(os.path.abspath(folder)) / "tree"
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry())) as checkpointer:
                checkpointer.save(saved, args=ocp.args.PyTreeSave(tree, custom_metadata={RECORD: record}))
        except (ShardwrightError, OSError):
            raise
        except Exception as error:
            raise InputError(f"--out {to}: Orbax could not write it: {str(error).split(' [', 1)[0][:600]}") from error
        for one in saved.iterdir():
            one.rename(folder / one.name)
        saved.rmdir()
        num_files = sum(one.is_file() for one in folder.rglob("*"))
    return {
        "folder": str(to),
        "from": str(checkpoint.directory),
        "target": "orbax",
        "step": checkpoint.point.step,
        "num_tensors": len(checkpoint.tensors),
        "num_files": num_files,
        "bytes": total,
        "values": ["/".join(map(str, path)) for path in entries.values],
    }


def _tree(checkpoint: Checkpoint, entries: Entries, count: Callable[[int], None]) -> Any:
    """The tree of all entries, with the nodes that had no leaves."""
    leaves: dict[StatePath, Any] = {}
    for name, path in entries.tensors.items():
        leaves[path] = _array(checkpoint, name, entries.keys.get(name), count)
    for path, value in entries.values.items():
        leaves[path] = _value(value, "/".join(map(str, path)))
    leaves |= {path: node for path, node in entries.empty.items() if path not in leaves}
    if not leaves:
        raise InputError(f"{checkpoint.directory}: it has no entries, and Orbax saves no empty tree.")
    # Under one more key, so that the tree itself may be a list.
    return nested({("tree", *path): leaf for path, leaf in leaves.items()})["tree"]


def _array(checkpoint: Checkpoint, name: str, key: str | None, count: Callable[[int], None]) -> Any:
    info = checkpoint.tensors[name]

    def read(box: Box) -> np.ndarray:
        array = checkpoint.read_box(name, box)
        count(array.nbytes)
        return array

    if key is not None:
        return jax.random.wrap_key_data(jnp.asarray(read(Box.whole(info.shape))), impl=key)
    if not prod(info.shape):
        raise CheckpointError(
            f"{checkpoint.directory}: '{name}' has the shape {info.shape}, and Orbax saves no array without elements.",
            code="SW504",
        )
    return BoxedArray(info.shape, np.dtype(info.dtype), read)


def _value(value: Any, place: str) -> Any:
    """A value as a node of a tree that Orbax saves."""
    if isinstance(value, Scalar):
        element = np.asarray(value.value, np.dtype(value.dtype))
        return BoxedArray((), element.dtype, lambda _: element)
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise InputError(f"'{place}' is a mapping with keys that are no texts, which Orbax does not keep.")
        return {key: _value(each, f"{place}/{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_value(each, f"{place}/{number}") for number, each in enumerate(value)]
    if type(value) is int and not -MOST_INTEGER <= value < MOST_INTEGER:
        raise InputError(f"'{place}' is an integer of more than 64 bits, which Orbax does not save.")
    return value
