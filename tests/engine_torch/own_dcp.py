"""What ranks do with ``torch.distributed.checkpoint`` and our planners and storage, and the error that each gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from shardwright.engine_torch.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from tests.engine_torch.own_refused import of_rank
from tests.engine_torch.own_saved import cleared, locals_of, sharded, stepped


def save_state(state: dict[str, Any], folder: str, step: int = 1) -> None:
    save(state, storage_writer=StorageWriter(folder, step), planner=SavePlanner())


def load_state(state: dict[str, Any], folder: str, step: int | None = None, **options: Any) -> None:
    load(state, storage_reader=StorageReader(folder, step), planner=LoadPlanner(**options))


def error_of(do: Callable[..., Any], *arguments: Any, **named: Any) -> tuple[str, list[int]]:
    """The error that the ranks get, and the ranks that it is from."""
    try:
        do(*arguments, **named)
    except CheckpointException as error:
        found = {rank: str(one) for rank, (one, _) in error.failures.items()}
        assert len(set(found.values())) == 1, found
        return next(iter(found.values())), sorted(found)
    return "", []


def save_small(kind: str, sizes: tuple[int, ...], folder: str, step: int = 1) -> None:
    module = sharded(kind, sizes)
    model, optimizer = get_state_dict(module, stepped(module))
    save_state({"model": model, "optim": optimizer, "next_row": step * 8}, folder, step)


def load_small(kind: str, sizes: tuple[int, ...], folder: str, step: int | None = None) -> tuple[list[str], Any]:
    """The names of what a rank does not hold after a load, as PyTorch itself shards it; and a value."""
    right = sharded(kind, sizes)
    needed = locals_of(right, stepped(right))
    module = cleared(sharded(kind, sizes))
    optimizer = stepped(module)
    model, state = get_state_dict(module, optimizer)
    everything = {"model": model, "optim": state, "next_row": 0}
    load_state(everything, folder, step)
    set_state_dict(module, optimizer, model_state_dict=model, optim_state_dict=state)
    found = locals_of(module, optimizer)
    wrong = [name for name, array in found.items() if array.tobytes() != needed[name].tobytes()]
    return wrong, everything["next_row"]


def refused(case: str, folder: str) -> tuple[str, list[int]]:
    return error_of(save_state, of_rank(case).state_dict(), folder)


class Refusing(StorageWriter):
    """The storage of a rank that cannot write its boxes."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            raise OSError("no disk")
        return super().write_data(plan, planner)


def one_rank_fails(folder: str) -> tuple[str, list[int]]:
    """A second save, of which rank 1 writes nothing; then a third, which must not be in its way."""
    module = sharded("fsdp", (4,))
    with torch.no_grad():
        for one in module.parameters():
            one.mul_(2)
    planner = SavePlanner()
    writer = Refusing(folder, 2)
    found = error_of(save, module.state_dict(), storage_writer=writer, planner=planner)
    writer.reset(f"{folder}/step-3")
    dist.barrier()
    return found


def one_rank_needs_another_shape(folder: str) -> tuple[str, list[int]]:
    state = sharded("fsdp", (4,)).state_dict()
    if dist.get_rank() == 2:
        state["up.bias"] = torch.zeros(8)
    return error_of(load_state, {"model": state, "next_row": 0}, folder, only=["model.*", "next_row"])


def as_stateful(folder: str) -> list[str]:
    """A module given as it is, whose ``state_dict`` and ``load_state_dict`` DCP calls."""
    module, other = sharded("fsdp", (4,)), cleared(sharded("fsdp", (4,)))
    save_state({"app": module}, folder)
    load_state({"app": other}, folder)
    return [name for name, one in module.state_dict().items() if not _equal(one, other.state_dict()[name])]


def _equal(one: Any, other: Any) -> bool:
    local = [each.to_local() if hasattr(each, "to_local") else each for each in (one, other)]
    return torch.equal(*local)


def without_our_planner(folder: str) -> tuple[str, list[int]]:
    state = nn.Linear(2, 2).state_dict()
    return error_of(save, state, storage_writer=StorageWriter(folder, 1))
