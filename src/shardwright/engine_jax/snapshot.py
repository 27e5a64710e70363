"""Between a run's state on devices and the checkpoint store: boxes out, boxes in, on whatever layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from shardwright.checkpoint import Checkpoint, OwnedBox, RunPoint, TensorInfo, save_checkpoint
from shardwright.core.box import Box
from shardwright.core.plan import Plan
from shardwright.engine_jax.shardings import resting_spec
from shardwright.engine_jax.state import State, Tensor, arrays_of, box_of, make_state, tensors_of


def save_state(
    out: Path,
    state: State[jax.Array],
    plan: Plan,
    mesh: Mesh,
    *,
    seed: int,
    next_row: int,
    metadata: Mapping[str, Any],
    keep: int | None,
) -> Path:
    """Write the state as the checkpoint of its step, each distinct box once, copied from its device when its turn comes.

    ``next_row``: the global index of the next row to read. Raises CheckpointError, with nothing half-written left.
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
    return save_checkpoint(out, point, infos, _owned_boxes(state), keep=keep)


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
