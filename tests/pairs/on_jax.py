"""The JAX side: a state on simulated devices is saved, and one that is loaded is compared shard by shard."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from shardwright.checkpoint import Checkpoint, RunPoint, open_newest, save_checkpoint
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.snapshot import infos_of, load_state, own_boxes
from shardwright.engine_jax.training.state import State, Tensor, arrays_of, make_state, tensors_of
from shardwright.runs.background import Saver
from shardwright.runs.processes.group import Alone
from shardwright.training.options import Silent
from tests.pairs.cases import as_bits, values_of


def save(plan: Plan, point: RunPoint, out: Path, *, asynchronous: bool) -> None:
    """Save the state of ``values_of``, once it is compared."""
    mesh = device_mesh(plan.mesh)
    state = make_state(plan, mesh, lambda tensor, boxes: [_values(tensor)[box.slices] for box in boxes], point.step)
    assert not differing(state, plan, mesh, point.step)
    with Saver(out, Alone(), Silent(), keep=None, asynchronous=asynchronous) as saver:
        saver.save(point, infos_of(plan, mesh), own_boxes(state, plan, mesh))


def saved_again(plan: Plan, checkpoint: Checkpoint, out: Path) -> None:
    """Load a checkpoint, and save what was loaded."""
    mesh = device_mesh(plan.mesh)
    state = load_state(checkpoint, plan, mesh)
    save_checkpoint(out, checkpoint.point, infos_of(plan, mesh), own_boxes(state, plan, mesh))


def loaded(plan: Plan, folders: list[Path], step: int) -> list[list[str]]:
    """For each folder the names of what its checkpoint gives that is not the state of ``values_of``."""
    mesh = device_mesh(plan.mesh)
    return [differing(load_state(open_newest(folder), plan, mesh), plan, mesh, step) for folder in folders]


def differing(state: State[jax.Array], plan: Plan, mesh: Mesh, step: int) -> list[str]:
    """The arrays of which a device holds other bits than NumPy's array has at the indices that JAX gives the device.

    Padding is zero.
    """
    arrays = arrays_of(state)
    tensors = {tensor.name: tensor for tensor in tensors_of(plan, mesh)}
    assert arrays.keys() == tensors.keys()
    wrong = [] if int(state.step) == step else ["step"]
    for name, tensor in tensors.items():
        array, full = arrays[name], np.zeros(tensor.shape, tensor.dtype)
        full[Box.whole(tensor.saved).slices] = _values(tensor)
        assert (array.shape, array.dtype, array.sharding) == (tensor.shape, tensor.dtype, tensor.sharding)
        assert len(array.addressable_shards) == plan.mesh.num_devices
        if any(
            not np.array_equal(as_bits(np.asarray(shard.data)), as_bits(full[shard.index]))
            for shard in array.addressable_shards
        ):
            wrong.append(name)
    return wrong


def _values(tensor: Tensor) -> np.ndarray:
    return values_of(tensor.name, tensor.saved, str(tensor.dtype))
