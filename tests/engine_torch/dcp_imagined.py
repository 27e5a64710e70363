"""Ranks that do not exist, which save and load by our planners and storage, in the order in which DCP calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.engine_torch.dcp import LoadPlanner, SavePlanner, StorageReader, StorageWriter

State = dict[str, Any]
MakeState = Callable[[DeviceMesh, int], State]
"""The state of a rank on the mesh."""


@contextmanager
def imagined(rank: int, sizes: Sequence[int], names: Sequence[str]) -> Iterator[DeviceMesh]:
    count = torch.Size(sizes).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)
    try:
        yield init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))
    finally:
        dist.destroy_process_group()


def states(sizes: Sequence[int], names: Sequence[str], make: MakeState) -> list[State]:
    found = []
    for rank in range(torch.Size(sizes).numel()):
        with imagined(rank, sizes, names) as mesh:
            found.append(make(mesh, rank))
    return found


def save_all(folder: Path, step: int, states: Sequence[State]) -> None:
    """Every rank's calls, phase by phase."""
    planners = [SavePlanner() for _ in states]
    writers = [StorageWriter(folder, step) for _ in states]
    plans = []
    for rank, (planner, writer, state) in enumerate(zip(planners, writers, states, strict=True)):
        planner.set_up_planner(state, writer.storage_meta(), rank == 0)
        writer.set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results = [
        writer.write_data(planner.finish_plan(plan), planner).value()
        for planner, writer, plan in zip(planners, writers, plans, strict=True)
    ]
    writers[0].finish(metadata, results)


def load_all(folder: Path, states: Sequence[State]) -> None:
    """Every rank's calls, phase by phase; the states are filled in place."""
    planners = [LoadPlanner() for _ in states]
    readers = [StorageReader(folder) for _ in states]
    plans = []
    for rank, (planner, reader, state) in enumerate(zip(planners, readers, states, strict=True)):
        metadata = reader.read_metadata()
        planner.set_up_planner(state, metadata, rank == 0)
        reader.set_up_storage_reader(metadata, rank == 0)
        plans.append(reader.prepare_local_plan(planner.create_local_plan()))
    plans = readers[0].prepare_global_plan(planners[0].create_global_plan(plans))
    for planner, reader, plan in zip(planners, readers, plans, strict=True):
        reader.read_data(planner.finish_plan(plan), planner)


def chunk(rows: torch.Tensor, number: int) -> list[torch.Tensor]:
    """``torch.chunk``, with empty chunks up to the number."""
    found = list(torch.chunk(rows, number))
    return found + [rows[:0]] * (number - len(found))


def held(size: int, tp: int, dp: int, rank: int) -> torch.Tensor:
    """The rows that ``fully_shard`` over dp stores of a dim that tp has sharded: chunks of chunks."""
    index, within = divmod(rank, tp)
    return chunk(chunk(torch.arange(float(size)), tp)[within], dp)[index]


def as_fsdp_says(rows: torch.Tensor, mesh: DeviceMesh, size: int) -> DTensor:
    """The DTensor that ``fully_shard`` makes of these rows after tensor parallelism."""
    tp = mesh.size(1)
    placements = [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size((size,)), stride=(1,))
