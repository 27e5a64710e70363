"""What PyTorch's checkpoint makes of an uneven dim, against PyTorch's own functions: all sizes up to 64 on 16 meshes.

Offsets, the check of a save, the items of a load and the slices of tensors are PyTorch's. ``tests/engine_torch/test_reloading.py``
saves and loads some of the same sizes on ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import _validate_global_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.core.boxes.reloading import Reloading, reloading
from tests.matrix import rest

OLD = -1
"""What a rank has in each row before a load; a saved row has its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """``stale``: rows that are as they were. ``wrong``: rows with the number of another. ``failed``: the load raised."""

    stale: int
    wrong: int
    failed: bool


def held(size: int, tensor: int, fsdp: int) -> dict[tuple[int, int], torch.Tensor]:
    """The rows of each rank (fsdp, tensor): chunks of tensor parallelism, each chunked by ``fully_shard``."""

    def chunks(rows: torch.Tensor, number: int) -> list[torch.Tensor]:
        found = list(torch.chunk(rows, number))
        return found + [rows[:0]] * (number - len(found))

    parts = chunks(torch.arange(size), tensor)
    return {(d, t): chunks(parts[t], fsdp)[d].clone() for d, t in product(range(fsdp), range(tensor))}


def named(size: int, tensor: int, fsdp: int) -> dict[tuple[int, int], ChunkStorageMetadata]:
    placements = [_StridedShard(0, split_factor=tensor), Shard(0)]
    found = {}
    for at in product(range(fsdp), range(tensor)):
        shape, offset = _compute_local_shape_and_global_offset((size,), (fsdp, tensor), list(at), placements)
        found[at] = ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))
    return found


def metadata_of(size: int, chunks: Iterable[ChunkStorageMetadata]) -> TensorStorageMetadata:
    # Empty shards have one offset, so that PyTorch keeps one of them.
    distinct = {tuple(chunk.offsets): chunk for chunk in chunks}
    return TensorStorageMetadata(properties=TensorProperties(), size=torch.Size([size]), chunks=list(distinct.values()))


def is_saved(metadata: TensorStorageMetadata) -> bool:
    # A list of faults since 2.12, and whether it is valid before.
    return _validate_global_plan([SavePlan([])] * 2, Metadata({"w": metadata})) in (True, [])


def loaded(
    metadata: TensorStorageMetadata,
    files: dict[tuple[int, ...], torch.Tensor],
    chunk: ChunkStorageMetadata,
    own: torch.Tensor,
) -> Loaded:
    """A load into a rank that holds the rows ``own`` and names those of ``chunk``."""
    target = torch.full_like(own, OLD)
    for item in create_read_items_for_chunk_list("w", metadata, [chunk]):
        assert item.storage_index.offset is not None
        read = narrow_tensor_by_index(files[tuple(item.storage_index.offset)], item.storage_offsets, item.lengths)
        into = narrow_tensor_by_index(target, item.dest_offsets, item.lengths)
        if read.shape != into.shape:
            return Loaded(stale=0, wrong=0, failed=True)
        into.copy_(read)
    stale = target == OLD
    return Loaded(stale=int(stale.sum()), wrong=int((~stale & (target != own)).sum()), failed=False)


def assert_as_found(found: Reloading, size: int, tensor: int, fsdp: int) -> None:
    rows, chunks = held(size, tensor, fsdp), named(size, tensor, fsdp)
    metadata = metadata_of(size, chunks.values())
    assert found.ranks == len(rows)
    assert found.is_saved == is_saved(metadata)
    if not found.is_saved:
        return
    files = {tuple(chunk.offsets): rows[at] for at, chunk in chunks.items() if chunk.sizes[0] or not rows[at].numel()}
    again = [loaded(metadata, files, chunks[at], own) for at, own in rows.items()]
    assert [one.failed for one in again] == [False] * len(rows)
    assert sum(one.stale > 0 for one in again) == found.stale
    assert sum(one.wrong for one in again) == 0
    # Under another layout: all of it on one device.
    full = ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([size]))
    alone = loaded(metadata, files, full, torch.arange(size))
    assert alone.failed == (found.short > 0)
    if not alone.failed:
        assert (alone.wrong > 0) == (found.moved > 0)


MESHES = list(product((2, 3, 4, 8), repeat=2))


@pytest.mark.parametrize("every", [9, rest(1)])
def test_small_sizes_are_saved_and_loaded_as_found(every: int) -> None:
    """All that are not right, and some or all of those that are."""
    right = refused = stale = 0
    for (tensor, fsdp), size in product(MESHES, range(1, 65)):
        found = reloading(size, (tensor,), fsdp)
        if not found.is_right or size % every == 0:
            assert_as_found(found, size, tensor, fsdp)
        right += found.is_right
        refused += not found.is_saved
        stale += found.is_saved and found.stale > 0
        assert size % tensor or found.is_right
    assert (right, refused, stale) == (953, 39, 32)


def test_a_large_vocabulary_is_saved_and_loaded_as_found() -> None:
    for tensor, fsdp in ((2, 4), (4, 2), (8, 3), (3, 5)):
        assert_as_found(reloading(50257, (tensor,), fsdp), 50257, tensor, fsdp)


def test_the_number_of_ranks_does_not_matter() -> None:
    """Indices of one kind are counted, not visited."""
    assert reloading(50257, (64,), 1 << 14).ranks == 1 << 20
