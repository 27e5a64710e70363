"""The PyTorch side, which runs on ranks: a state is saved, and one that is loaded is gathered and compared. No JAX is loaded here."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwright.checkpoint import RunPoint, open_newest
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.boxes import shard_box
from shardwright.core.plan.fsdp_groups import WeightOfLayer
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.delayed import FACTOR, HISTORY
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.own_program.store import members_of
from shardwright.engine_torch.training.state import State, boxes_of, load_state, make_state, tensors_of
from shardwright.runs.background import Saver
from shardwright.training.optimizer import FIRST, SECOND
from shardwright.training.options import Silent
from tests.engine_torch.training import model_of
from tests.pairs.cases import values_of

Shards = dict[str, torch.Tensor]

# It warns of gathers that are slow.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def save(plan: Plan, point: RunPoint, out: Path, asynchronous: bool) -> None:
    """Save the state of ``values_of``."""
    model = model_of(plan)
    infos = {info.name: info for info in tensors_of(plan)}

    def read(name: str, boxes: Sequence[Box]) -> list[torch.Tensor]:
        array = values_of(name, tuple(infos[name].shape), infos[name].dtype)
        return [_tensor(array[box.slices], infos[name].dtype) for box in boxes]

    state = make_state(model, read, point.step)
    with Saver(out, members_of(None), Silent(), keep=None, asynchronous=asynchronous) as saver:
        saver.save(point, list(infos.values()), boxes_of(state))


def saved_again(plan: Plan, folder: Path, out: Path) -> None:
    """Load a checkpoint, and save what was loaded."""
    checkpoint = open_newest(folder)
    state = load_state(model_of(plan), checkpoint)
    with Saver(out, members_of(None), Silent(), keep=None, asynchronous=False) as saver:
        saver.save(checkpoint.point, tensors_of(plan), boxes_of(state))


def loaded(plan: Plan, folders: Sequence[Path], step: int) -> list[list[str]]:
    """For each folder the names of what its checkpoint gives that is not the state of ``values_of``.

    The first state is gathered and compared in full; of every other one, each rank compares its shards with those of the first.
    """
    model = model_of(plan)
    found: list[list[str]] = []
    right: Shards | None = None
    for folder in folders:
        state = load_state(model, open_newest(folder))
        if right is None:
            found.append(differing(state, step))
            right = {} if found[-1] else _copies(state)
        else:
            shards = _shards(state)
            assert shards.keys() == right.keys() or not right
            found.append([name for name, one in shards.items() if name not in right or not _same(one, right[name])])
            found[-1] += [] if state.step == step else ["step"]
    return found


def differing(state: State, step: int) -> list[str]:
    """The tensors that ``DTensor.full_tensor`` gathers with other bits than a model on one device would hold.

    That is NumPy's array in the order of dims in which PyTorch stores it. Padding is zero.
    """
    model = state.model
    infos = {info.name: info for info in tensors_of(model.plan)}
    wrong = [] if state.step == step else ["step"]
    parameters = model.parameters()
    for one in model.weights:
        arrays = {"": parameters[one.key], FIRST: state.first[one.key], SECOND: state.second[one.key]}
        for prefix, array in arrays.items():
            info = infos[prefix + one.weight]
            values = values_of(info.name, tuple(info.shape), info.dtype)
            needed = _tensor(_as_stored(model.plan, one, values), info.dtype)
            if prefix and one.update_splits:
                array, needed = local_of(array), _own_part(needed, one, model)
                same = _same(array, needed)
            else:
                same = _same(_full(array, parameters[one.key]), needed)
            if not same:
                wrong.append(prefix + one.key)
    for name, array in model.only.frozen.items():
        if not _same(array, _tensor(values_of(name, tuple(infos[name].shape), infos[name].dtype), infos[name].dtype)):
            wrong.append(name)
    for one in model.plan.delayed_tensors:
        array, info = _delayed(model)[one.name], infos[one.name]
        box = shard_box(one.spec, model.plan.mesh, one.shape, dist.get_rank())
        assert box is not None
        if not _same(array, _tensor(values_of(info.name, tuple(info.shape), info.dtype)[box.slices], info.dtype)):
            wrong.append(one.name)
    # Ranks gather together, so each of them must know of all.
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, wrong)
    return sorted({name for names in gathered for name in names})


def _own_part(full: torch.Tensor, one: WeightOfLayer, model: Model) -> torch.Tensor:
    """What a rank keeps for its shard of a weight, as PyTorch chunks tensors."""
    mesh, ranks = model.plan.mesh, model.ranks
    box = one.box(mesh, ranks.rank)
    part = full[:0] if box is None else full[box.slices]
    for axes in one.update_splits:
        chunks = part.chunk(mesh.size(axes), one.update_dim)
        index, _ = ranks.place_over(axes)
        part = chunks[index] if index < len(chunks) else part.narrow(one.update_dim, 0, 0)
    return part


def _full(array: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A parameter gathered, or a moment that is sharded as its parameter is."""
    if not isinstance(parameter, DTensor):
        return array.detach()
    if not isinstance(array, DTensor):
        array = DTensor.from_local(
            array,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    whole = array.detach()
    assert isinstance(whole, DTensor)
    return whole.full_tensor()


def _as_stored(plan: Plan, one: WeightOfLayer, values: np.ndarray) -> np.ndarray:
    """One layer of a weight with its dims in PyTorch's order, merged as PyTorch merges them, and with its padding."""
    weight = plan.request.table.weight(one.weight)
    array = values if one.layer is None else values[one.layer]
    dims = weight.torch_dims or tuple((name,) for name in weight.logical_axes)
    order = [weight.logical_axes.index(name) for dim in dims for name in dim]
    shape = [int(np.prod([weight.size(name) for name in dim])) for dim in dims]
    stored = np.transpose(array, order).reshape(shape)
    padded = np.zeros(one.shape, stored.dtype)
    padded[tuple(slice(size) for size in stored.shape)] = stored
    return padded


def _shards(state: State) -> Shards:
    """Everything that a rank holds."""
    found: Shards = {**state.model.only.frozen, **_delayed(state.model)}
    for key, parameter in state.model.parameters().items():
        found |= {key: local_of(parameter.detach()), FIRST + key: state.first[key], SECOND + key: state.second[key]}
    return found


def _delayed(model: Model) -> Shards:
    """What a rank keeps for delayed amaxes, by its names in a checkpoint."""
    factors = {FACTOR + name: one.factor for name, one in model.only.delayed.items()}
    return {**factors, **{HISTORY + name: one.history for name, one in model.only.delayed.items()}}


def _copies(state: State) -> Shards:
    return {name: one.clone() for name, one in _shards(state).items()}


BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    kind = BITS[one.dtype.itemsize]
    return torch.equal(one.detach().contiguous().view(kind), other.detach().contiguous().view(kind))


def _tensor(array: np.ndarray, dtype: str) -> torch.Tensor:
    """A tensor with the bits of an array."""
    kind = f"i{array.dtype.itemsize}"
    return torch.from_numpy(np.array(array).view(kind).reshape(array.shape)).view(getattr(torch, dtype))
