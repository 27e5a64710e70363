"""Between a run's state on devices and the checkpoint store: boxes out, boxes in, on whatever layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh

from shardwright.checkpoint import (
    Checkpoint,
    CheckpointError,
    OwnedBox,
    RunPoint,
    TensorInfo,
    commit,
    join_save,
    save_checkpoint,
    saving,
    write_part,
)
from shardwright.checkpoint.directory import step_directory
from shardwright.core.box import Box
from shardwright.core.plan import Plan
from shardwright.engine_jax.group import Group
from shardwright.engine_jax.shardings import resting_spec
from shardwright.engine_jax.state import State, Tensor, arrays_of, box_of, make_state, tensors_of


def save_state(
    out: Path,
    state: State[jax.Array],
    plan: Plan,
    mesh: Mesh,
    group: Group,
    *,
    seed: int,
    next_row: int,
    metadata: Mapping[str, Any],
    keep: int | None,
) -> Path:
    """Write the state as the checkpoint of its step, each distinct box once, copied from its device when its turn comes.

    Each process of the group writes the boxes that are its own; process 0 commits when all are there. ``next_row``: the
    global index of the next row to read. Raises CheckpointError in all processes, with nothing half-written left, where
    one of them cannot write.
    """
    specs = {row.name: str(resting_spec(row)) for row in plan.weights}
    infos = [
        TensorInfo(name=row.name, shape=row.shape, dtype=str(row.dtype), spec=specs[row.weight])
        for row in tensors_of(plan, mesh)
    ]
    point = RunPoint(
        step=int(state.step),
        seed=seed,
        data_position=next_row,
        model=plan.request.table.name,
        layout_name=plan.request.layout.name,
        layout_text=plan.dump(),
        mesh=plan.mesh.shape,
        metadata=metadata,
    )
    if group.count == 1:
        return save_checkpoint(out, point, infos, _owned_boxes(state), keep=keep)
    return _save_together(out, point, infos, _owned_boxes(state), group, keep)


def _save_together(
    out: Path, point: RunPoint, infos: Sequence[TensorInfo], boxes: Iterator[OwnedBox], group: Group, keep: int | None
) -> Path:
    """The three steps of a save by several processes, each taken when all have taken the one before."""
    name, first = f"the checkpoint of step {point.step}", group.index == 0
    # Process 0 leaves the save, which deletes what is not committed, when all have been told.
    with ExitStack() as held:
        begun = all_or_none(
            group, f"{name}, begin", lambda: held.enter_context(saving(out, point.step)) if first else None
        )
        all_or_none(
            group,
            f"{name}, write",
            lambda: write_part(begun or join_save(out, point.step), infos, boxes, process=group.index),
        )
        return all_or_none(
            group,
            f"{name}, commit",
            lambda: (
                step_directory(out, point.step)
                if begun is None
                else commit(begun, point, num_processes=group.count, keep=keep)
            ),
        )


Result = TypeVar("Result")


def all_or_none(group: Group, name: str, do: Callable[[], Result]) -> Result:
    """What ``do`` returns, when it has succeeded in every process.

    Raises its own CheckpointError where it failed here, and one that names the process where it failed elsewhere.
    """
    result, error = None, None
    try:
        result = do()
    except CheckpointError as raised:
        error = raised
    held = group.exchange(name, None if error is None else str(error))
    if error is not None:
        raise error
    for value, process in held:
        if value is not None:
            raise CheckpointError(f"{name}: process {process} of {group.count} could not do it. It said: {value}")
    return cast(Result, result)


def load_state(checkpoint: Checkpoint, plan: Plan, mesh: Mesh) -> State[jax.Array]:
    """The state of a checkpoint, placed as the plan says, whatever layout wrote it.

    Raises CheckpointError for a tensor that is missing, extra, mis-shaped or mis-typed, and for damaged bytes.
    """
    checkpoint.expect({row.name: (row.shape, str(row.dtype)) for row in tensors_of(plan, mesh)})

    def read(tensor: Tensor, box: Box) -> np.ndarray:
        return checkpoint.read_box(tensor.name, box)

    return make_state(plan, mesh, read, checkpoint.point.step)


def _owned_boxes(state: State[jax.Array]) -> Iterator[OwnedBox]:
    for name, array in arrays_of(state).items():
        for shard in array.addressable_shards:
            if shard.replica_id == 0:
                yield OwnedBox(name=name, box=box_of(shard.index, array.shape), array=_copy_of(shard))


def _copy_of(shard: jax.Shard):
    return lambda: np.asarray(shard.data)
