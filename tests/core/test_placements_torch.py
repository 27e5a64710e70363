"""Predicted placements against PyTorch itself: every rank of a 2 x 3 x 4 mesh, on the fake process group."""

from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as TorchPlacement
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.boxes.placements import Placement, Shard, StridedShard, placements_of
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from tests.core.placed import placement_boxes

MESH = Mesh.of(x=2, y=3, z=4)
ORDERS = [order for n in range(4) for order in permutations(MESH.names, n)]
SPECS = [Spec.of(heads=order[:n], embed=order[n:]) for order in ORDERS for n in range(len(order) + 1)]


def in_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, StridedShard):
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return TorchShard(placement.dim) if isinstance(placement, Shard) else TorchReplicate()


@pytest.fixture(params=range(24))
def rank(request: pytest.FixtureRequest) -> Iterator[tuple[int, DeviceMesh]]:
    """This process as one rank of 24, none of which exists."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=24)
    try:
        yield request.param, init_device_mesh("cpu", (2, 3, 4), mesh_dim_names=MESH.names)
    finally:
        dist.destroy_process_group()


def numbered(shape: tuple[int, int]) -> torch.Tensor:
    """Every element its own number."""
    return torch.arange(shape[0] * shape[1]).view(shape)


def local(shape: tuple[int, int], mesh: DeviceMesh, placements: list[TorchPlacement]) -> torch.Tensor:
    # Without a source rank each rank shards its own copy: no communication, which a fake group cannot do.
    placed = distribute_tensor(numbered(shape), mesh, placements, src_data_rank=None)
    assert isinstance(placed, DTensor)
    return placed.to_local()


def test_every_order_gives_each_rank_the_box_of_the_spec(rank: tuple[int, DeviceMesh]) -> None:
    device, mesh = rank
    shape = (48, 24)
    for spec in SPECS:
        placements = [in_torch(placement) for placement in placements_of(spec, MESH)]
        box = shard_box(spec, MESH, shape, device)
        assert box is not None
        assert (box.shape, box.start) == compute_local_shape_and_global_offset(shape, mesh, placements), str(spec)
        assert torch.equal(local(shape, mesh, placements), numbered(shape)[box.slices]), str(spec)


def test_on_uneven_dims_our_reading_of_placements_is_theirs(rank: tuple[int, DeviceMesh]) -> None:
    """Rows with gaps and parts of different sizes: whatever the placements mean, both read them alike."""
    device, mesh = rank
    shape = (29, 13)
    for spec in SPECS:
        placements = placements_of(spec, MESH)
        found = local(shape, mesh, [in_torch(placement) for placement in placements])
        boxes = placement_boxes(placements, MESH, shape, device)
        assert sum(box.size for box in boxes) == found.numel()
        held = [numbered(shape)[box.slices].flatten() for box in boxes]
        assert sorted(torch.cat(held).tolist() if held else []) == sorted(found.flatten().tolist()), str(spec)


def test_rows_with_gaps_are_several_boxes(rank: tuple[int, DeviceMesh]) -> None:
    device, mesh = rank
    placements = (Shard(1), StridedShard(0, 2), StridedShard(0, 3))
    boxes = placement_boxes(placements, MESH, (72, 4), device)
    found = local((72, 4), mesh, [in_torch(placement) for placement in placements])
    assert len(boxes) == 3
    assert torch.equal(torch.cat([numbered((72, 4))[box.slices] for box in boxes]), found)
