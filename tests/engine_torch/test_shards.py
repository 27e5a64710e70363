"""The boxes that a rank holds, from its placements and its shape: as ``fully_shard`` shards a dim, and as ``distribute_tensor`` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardwright.core.boxes.held import Reading, agreed
from shardwright.engine_torch.own_program.shards import Shards, boxes_of, shards_of, votes_of
from tests.engine_torch.dcp_imagined import as_fsdp_says, held, imagined

SIZES = range(1, 49)
MESHES = [(3, 2), (4, 2), (3, 4)]
"""The sizes of dp and tp."""

Make = Callable[[DeviceMesh, int, int], DTensor]
"""The DTensor of a rank, of a size, whose rows are numbered."""


def by_fully_shard(mesh: DeviceMesh, rank: int, size: int) -> DTensor:
    return as_fsdp_says(held(size, mesh.size(1), mesh.size(0), rank), mesh, size)


def by_distribute_tensor(mesh: DeviceMesh, rank: int, size: int) -> DTensor:
    del rank
    placements: list[Placement] = [_StridedShard(0, split_factor=mesh.size(1)), Shard(0)]
    # Without a source rank each rank shards its own copy.
    return distribute_tensor(torch.arange(float(size)), mesh, placements, src_data_rank=None)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("make", [by_fully_shard, by_distribute_tensor])
def test_the_boxes_are_the_rows_that_ranks_hold(sizes: tuple[int, int], make: Make) -> None:
    by_rank: list[dict[int, Shards]] = []
    for rank in range(sizes[0] * sizes[1]):
        with imagined(rank, sizes, ("dp", "tp")) as mesh:
            by_rank.append({size: shards_of(f"{size}", make(mesh, rank, size)) for size in SIZES})
    readings, contradicted = agreed(dict(vote for one in rank.values() for vote in votes_of(one)) for rank in by_rank)
    assert contradicted == frozenset()
    wrong = [
        (size, number)
        for number, rank in enumerate(by_rank)
        for size, one in rank.items()
        if _rows_of(one, readings.get(one.name)) != one.local.tolist()
    ]
    assert wrong == []
    # Both kinds of ranks are among them: those that know how they were sharded, and those that cannot.
    assert readings
    assert set(readings.values()) == {"nested" if make is by_fully_shard else "placed"}


def _rows_of(one: Shards, reading: Reading | None) -> list[float]:
    return [float(row) for each in boxes_of(one, reading) for row in range(each.box.start[0], each.box.stop[0])]


def test_ranks_that_contradict_each_other() -> None:
    """One rank holds what ``fully_shard`` gives it, and another what ``distribute_tensor`` does."""
    votes = []
    for rank, make in ((0, by_fully_shard), (5, by_distribute_tensor), (4, by_fully_shard)):
        with imagined(rank, (3, 2), ("dp", "tp")) as mesh:
            votes.append(dict(votes_of(shards_of("w", make(mesh, rank, 7)))))
    assert agreed(votes)[1] == frozenset({"w"})


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    with imagined(3, (4,), ("x",)):
        mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("y",))
        placed = DTensor.from_local(
            torch.zeros(0), mesh, [Replicate()], run_check=False, shape=torch.Size((2,)), stride=(1,)
        )
        assert boxes_of(shards_of("w", placed)) == ()
