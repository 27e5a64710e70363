"""From a run's state on devices to the boxes of a checkpoint and back, for any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from shardwright.checkpoint import OwnedBox, TensorInfo
from shardwright.checkpoint.exchange.passing import Together
from shardwright.checkpoint.exchange.wants import Want, needed_by_all, wants_of_plan
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import saves
from shardwright.core.model.optimizer import MASTER
from shardwright.core.plan.plan import Plan
from shardwright.engine_jax.io.exchange import ProcessCarrier
from shardwright.engine_jax.lowering.resting import resting_names
from shardwright.engine_jax.lowering.updates import own_parts
from shardwright.engine_jax.training.state import State, Tensor, arrays_of, box_of, make_state, tensors_of
from shardwright.runs import HeldReplica, Reads, Weights
from shardwright.training.optimizer import STATE, saved_as
from shardwright.training.published import KEPT


def infos_of(plan: Plan, mesh: Mesh) -> list[TensorInfo]:
    """Every tensor of a plan's state as a checkpoint stores it."""
    tensors = (
        TensorInfo(name=row.name, shape=row.saved, dtype=str(row.dtype), spec=str(row.spec))
        for row in tensors_of(plan, mesh)
    )
    return [*tensors, *_shared(plan)]


def _shared(plan: Plan) -> list[TensorInfo]:
    shared = plan.request.optimizer.shared
    return [TensorInfo(name=name, shape=shape, dtype=dtype) for name, (shape, dtype) in shared.items()]


def own_boxes(state: State[jax.Array], plan: Plan, mesh: Mesh) -> Iterator[OwnedBox]:
    """This process's boxes of a state: over all processes, each distinct box once. Its array is copied from the device on call."""
    arrays = arrays_of(state)
    numbers = {device: number for number, device in enumerate(mesh.devices.flat)}
    for tensor in tensors_of(plan, mesh):
        spec, array = tensor.spec, arrays[tensor.name]
        for shard in array.addressable_shards:
            if saves(spec, plan.mesh, numbers[shard.device]):
                box = box_of(shard.index, array.shape)
                for inside, saved in tensor.parts(box):
                    # A weight that rests as codes is saved as what it is in its dtype: these follow from it.
                    yield OwnedBox(name=tensor.name, box=saved, array=_copy_of(shard, inside.within(box), tensor.dtype))
    if any(numbers[device] == 0 for device in mesh.local_devices):
        for name, array in state.shared.items():
            yield OwnedBox(name=name, box=Box.whole(array.shape), array=_of_shared(array))


def weight_replicas(state: State[jax.Array], plan: Plan, mesh: Mesh) -> Iterator[HeldReplica]:
    """What each device of this process has of weights that other devices hold too."""
    numbers = {device: number for number, device in enumerate(mesh.devices.flat)}
    for tensor in tensors_of(plan, mesh):
        array = state.weights.get(tensor.name)
        axes = plan.mesh.larger_than_one(tensor.spec.axes)
        if array is None or plan.mesh.size(axes) == plan.mesh.num_devices:
            continue
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            owned = OwnedBox(name=tensor.name, box=box, array=_copy_of(shard, box.within(box), array.dtype))
            yield HeldReplica(device=numbers[shard.device], axes=" ".join(axes), box=owned)


def delayed_boxes(state: State[jax.Array]) -> Iterator[OwnedBox]:
    """What each device of this process keeps for delayed amaxes, replicas too."""
    for name, array in state.delayed.items():
        for shard in array.addressable_shards:
            box = box_of(shard.index, array.shape)
            yield OwnedBox(name=name, box=box, array=_copy_of(shard, box.within(box), array.dtype))


def _copy_of(shard: jax.Shard, part: Box, dtype: np.dtype) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(shard.data)[(*part.slices, ...)].astype(dtype, copy=False)


def _of_shared(array: jax.Array) -> Callable[[], np.ndarray]:
    return lambda: np.asarray(array.addressable_data(0))


def load_state(checkpoint: Weights, plan: Plan, mesh: Mesh, *, weights_only: bool = False) -> State[jax.Array]:
    """The state of a checkpoint, sharded as the plan says, whatever layout wrote it.

    With ``weights_only``, the state before the first step: moments are zero, and those of the checkpoint are not read.
    All processes call this: what several need is read by one of them.

    Raises CheckpointError for a tensor that is missing, extra, mis-shaped or mis-typed, DamagedError for damaged bytes.
    """
    rows = [row for row in tensors_of(plan, mesh) if row.name == row.weight or not weights_only]
    unread = (*STATE, KEPT) if weights_only else ()
    infos = [] if weights_only else _shared(plan)
    wanted = {row.name: (row.saved, str(row.dtype)) for row in rows} | {
        one.name: (one.shape, one.dtype) for one in infos
    }
    checkpoint.expect(wanted, unread=unread)
    source, codes = _by_all(checkpoint, plan, mesh), resting_names(plan)

    def read(tensor: Tensor, boxes: Sequence[Box]) -> Sequence[np.ndarray]:
        if weights_only and tensor.name == tensor.wide and tensor.weight in codes:
            return [array.astype(tensor.dtype) for array in source.read_boxes(tensor.weight, boxes)]
        if weights_only and tensor.name != tensor.weight:
            return [np.full(box.shape, tensor.first, tensor.dtype) for box in boxes]
        return source.read_boxes(tensor.name, boxes)

    if weights_only:
        return _with_master_weights(make_state(plan, mesh, read, 0), plan, mesh)
    shared = {one.name: source.read_boxes(one.name, [Box.whole(one.shape)])[0] for one in infos}
    return make_state(plan, mesh, read, checkpoint.point.step, shared)


def _with_master_weights(state: State[jax.Array], plan: Plan, mesh: Mesh) -> State[jax.Array]:
    """The state with each weight in a wider dtype too, where a step keeps that, as it is at rest."""
    if MASTER.prefix not in state.kept:
        return state
    wide = jnp.dtype(str(plan.request.master_dtype))

    def widened(weights: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
        return {name: part.astype(wide) for name, part in own_parts(plan, mesh, weights).items()}

    masters = {**state.kept[MASTER.prefix], **jax.jit(widened)(state.weights)}
    return state._replace(kept={**state.kept, MASTER.prefix: masters})


def _by_all(checkpoint: Weights, plan: Plan, mesh: Mesh) -> Reads:
    """What all processes read together."""
    if jax.process_count() == 1:
        return checkpoint
    carrier, devices = ProcessCarrier(), mesh.devices.reshape(-1)
    all_wants = cache(lambda: wants_of_plan(plan, lambda device: devices[device].process_index))

    def wants(name: str) -> Sequence[Want]:
        found = all_wants().get(saved_as(plan, name))
        # What an optimizer has besides, as a count of steps, is not sharded.
        return needed_by_all(checkpoint.tensors[name].shape, carrier.count) if found is None else found

    return Together(source=checkpoint, wants=wants, carrier=carrier)
