"""What ranks do that must be refused, with the message that each gets."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.core.plan.plan import Plan
from shardwright.engine_torch import load, parallelize, save
from shardwright.engine_torch.own_program import store
from shardwright.runs import saving
from tests.engine_torch.own_block import dense
from tests.engine_torch.own_saved import local, message, numbered, run_of, sharded, stepped


def line(size: int, name: str = "x") -> DeviceMesh:
    return init_device_mesh("cpu", (size,), mesh_dim_names=(name,))


def of_rank(case: str) -> nn.Module:
    """A module that the ranks do not hold alike."""
    rank, count = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (count // 2, 2), mesh_dim_names=("dp", "tp"))
    if case == "tensor parallelism of plain tensors":
        # Each rank of tp has rows of its own, and fully_shard sees a full weight.
        module = run_of({"weight": torch.full((4, 2), 10.0 + rank % 2)})
        fully_shard(module, mesh=mesh["dp"])
        return module
    if case == "experts of each rank":
        return run_of({"experts": torch.full((2, 3), float(rank))})
    if case == "replicas that have diverged":
        return run_of(
            {"w": DTensor.from_local(torch.full((2,), float(rank == 3)), line(count), [Replicate()], run_check=False)}
        )
    if case == "one replica of a shard":
        shard = torch.arange(2.0) + 2 * (rank % 2) + (rank == 2)
        return run_of({"w": DTensor.from_local(shard, mesh, [Replicate(), Shard(0)], run_check=False)})
    if case == "another shape on one rank":
        return run_of({"w": torch.zeros(3 if rank == 1 else 2)})
    # Ten rows over four ranks: without a shape, DTensor takes twelve for most ranks, and four for the last.
    rows = torch.zeros(min(3, 10 - 3 * rank), 2)
    if case == "rows that from_local counts wrong":
        return run_of({"w": DTensor.from_local(rows, line(count), [Shard(0)], run_check=False)})
    if case == "a shape that placements do not give":
        twelve = {"shape": torch.Size((12, 2)), "stride": (2, 1)}
        return run_of({"w": DTensor.from_local(rows, line(count), [Shard(0)], run_check=False, **twelve)})
    if case == "a sum over ranks":
        return run_of({"w": DTensor.from_local(torch.zeros(2), line(count), [Partial()], run_check=False)})
    if case == "a mesh in another order than its group":
        backwards = DeviceMesh("cpu", torch.arange(count).flip(0), mesh_dim_names=("dp",))
        return run_of({"w": DTensor.from_local(torch.zeros(2), backwards, [Shard(0)], run_check=False)})
    if case == "a value of one rank":
        return WithValue({rank} if rank == 2 else 1)
    assert case == "other values of an option", case
    return WithValue(rank // 2)


class WithValue(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


def refused(case: str, folder: str) -> str:
    return message(save, folder, of_rank(case), step=1)


def full_disk(folder: str) -> str:
    """Rank 1 cannot write its boxes."""
    write = saving.write_part

    def written(*arguments: Any, **named: Any) -> None:
        if dist.get_rank() == 1:
            raise saving.CheckpointError(f"no disk: {errno.errorcode[errno.ENOSPC]}")
        write(*arguments, **named)

    saving.write_part = written
    try:
        return message(save, folder, sharded("fsdp", (4,)), step=2)
    finally:
        saving.write_part = write


def fails_between(folder: str) -> tuple[str, float]:
    """Rank 2 fails when it has read the second tensor of a load: the message of each rank, and how long it took."""
    fill, filled = store.fill, list[str]()

    def filled_once(one: Any, *arguments: Any) -> None:
        fill(one, *arguments)
        filled.append(one.name)
        if dist.get_rank() == 2 and len(filled) == 2:
            raise saving.CheckpointError("no room on this device")

    module, started = sharded("fsdp", (4,)), time.monotonic()
    store.fill = filled_once
    try:
        return message(load, folder, module), time.monotonic() - started
    finally:
        store.fill = fill


def strided(folder: str) -> tuple[list[float], list[float]]:
    """Rows with gaps: what a rank holds, and what it holds after a load of what was saved."""
    mesh, rank = line(4), dist.get_rank()
    rows = torch.tensor([float(rank), 4.0 + rank])
    w = DTensor.from_local(
        rows, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=torch.Size([8]), stride=(1,)
    )
    save(folder, run_of({"w": w}), step=1)
    other = run_of({"w": torch.zeros_like(w)})
    load(folder, other)
    return rows.tolist(), local(other.w).tolist()


def other_keys(folder: str) -> dict[str, Any]:
    """Each rank has a tensor and a value of its own, as the stages of a pipeline do."""
    rank = dist.get_rank()
    module = run_of({f"stage{rank}": torch.full((2,), float(rank)), "shared": torch.ones(1)})
    save(folder, module, step=1, values={"rows": {f"rank {rank}": rank}})
    other = run_of({f"stage{rank}": torch.zeros(2), "shared": torch.zeros(1)})
    found = load(folder, other, only=[f"stage{rank}", "shared"])
    return {"values": found.values, "found": getattr(other, f"stage{rank}").tolist()}


def another_step_of_each(folder: str, step: int) -> list[str]:
    """Save one step more on each call, and load the newest: its step on this rank."""
    module = numbered()
    save(folder, module, step=step)
    return [str(load(folder, module).step), Path(folder).name]


def parallelized(plan: Plan, folder: str) -> list[str]:
    """A module sharded by a plan, saved, and loaded into one whose weights are zero: the names of what differs."""
    module, other = dense(), dense()
    for one in (module, other):
        parallelize(one, plan, device=torch.device("cpu"))
    with torch.no_grad():
        for one in other.parameters():
            one.zero_()
    save(folder, module, stepped(module), step=1)
    load(folder, other, torch.optim.AdamW(other.parameters(), lr=1.0))
    found = dict(other.named_parameters())
    return [name for name, one in module.named_parameters() if local(one).tobytes() != local(found[name]).tobytes()]
