"""What ranks declare of their state when a save or a load is planned, and what the coordinator concludes.

The boxes are those that a rank really holds (``own_program/shards.py``), several where its rows have gaps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwright.checkpoint import CheckpointError, TensorInfo
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.held import Reading, agreed
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import names_of
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.shards import Shards, boxes_of, require_one_reading, shards_of, votes_of
from shardwright.runs.own_program.values import differ

Place = tuple[str, Box]
"""A box of a tensor, by the tensor's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What one rank has: tensors, the boxes of each, and values.

    ``votes``: how this rank's shapes say that placements are read. ``open``: tensors whose shape here fits both readings.
    """

    infos: Mapping[str, TensorInfo]
    boxes: Mapping[str, tuple[Box, ...]]
    values: Mapping[str, Any]
    votes: Mapping[str, Reading]
    open: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assigned:
    """What one rank does in a save: it writes some boxes and hashes others, of which another rank writes a replica.

    ``name``: by which it joins the save. ``infos``: of all tensors.
    """

    name: str
    infos: tuple[TensorInfo, ...]
    writes: tuple[Place, ...]
    hashes: frozenset[Place]


def tensors_in(state: Mapping[str, Any]) -> dict[str, Shards]:
    """The tensors of a flattened state dict. Raises InputError for those that a checkpoint does not hold."""
    return {name: shards_of(name, one) for name, one in state.items() if isinstance(one, torch.Tensor)}


def declared(tensors: Mapping[str, Shards], values: Mapping[str, Any]) -> Declared:
    return Declared(
        infos={
            name: TensorInfo(name=name, shape=one.shape, dtype=one.dtype_name, spec=one.spec)
            for name, one in tensors.items()
        },
        boxes={name: tuple(each.box for each in boxes_of(one) if each.box.size) for name, one in tensors.items()},
        values=values,
        votes=dict(vote for one in tensors.values() for vote in votes_of(one)),
        open=frozenset(name for name, one in tensors.items() if one.fit is not None and one.fit.ambiguous),
    )


def require_readable(ranks: Sequence[Declared]) -> None:
    """Raise InputError where ranks' shapes contradict each other, or where a rank has assumed another reading than theirs."""
    found, contradicted = agreed(one.votes for one in ranks)
    require_one_reading(contradicted)
    wrong = sorted({name for one in ranks for name in one.open if found.get(name) == "placed"})
    if wrong:
        raise InputError(
            f"{names_of(wrong)}: sharded by `distribute_tensor` on a dim that its ranks do not divide, in a way that the shape on "
            f"one rank does not show. Use shardwright.engine_torch.save and load."
        )


def infos_of(ranks: Sequence[Declared]) -> tuple[TensorInfo, ...]:
    """The tensors of all ranks. Raises CheckpointError (SW502) for one name with several shapes or dtypes."""
    found: dict[str, tuple[TensorInfo, int]] = {}
    for rank, one in enumerate(ranks):
        for name, info in one.infos.items():
            before, first = found.setdefault(name, (info, rank))
            if (before.shape, before.dtype) != (info.shape, info.dtype):
                raise CheckpointError(
                    f"'{name}' is {before.dtype} {before.shape} on rank {first} and {info.dtype} {info.shape} on rank {rank}. "
                    f"Give each a name of its own.",
                    code="SW502",
                )
    return tuple(info for info, _ in found.values())


def values_of(ranks: Sequence[Declared]) -> Mapping[str, Any]:
    """The values of all ranks. Raises CheckpointError (SW502) where ranks have other values under one name."""
    found: dict[str, tuple[Any, int]] = {}
    for rank, one in enumerate(ranks):
        for name, value in one.values.items():
            before, first = found.setdefault(name, (value, rank))
            if differ(before, value):
                raise CheckpointError(
                    f"'{name}' is {before!r:.80} on rank {first} and {value!r:.80} on rank {rank}: a checkpoint has one value for "
                    f"all. Give all the same, or a name for each.",
                    code="SW502",
                )
    return {name: value for name, (value, _) in found.items()}


def holders_of(ranks: Sequence[Declared]) -> Mapping[Place, tuple[int, ...]]:
    """The ranks that hold each box."""
    found: dict[Place, list[int]] = {}
    for rank, one in enumerate(ranks):
        for name, boxes in one.boxes.items():
            for box in boxes:
                found.setdefault((name, box), []).append(rank)
    return {place: tuple(holders) for place, holders in found.items()}


def assigned(ranks: Sequence[Declared], infos: tuple[TensorInfo, ...], name: str) -> tuple[Assigned, ...]:
    """What each rank does: each box is written by one of its holders, a different one for each in turn, and hashed by all."""
    writes: list[list[Place]] = [[] for _ in ranks]
    hashes: list[set[Place]] = [set() for _ in ranks]
    for number, (place, holders) in enumerate(holders_of(ranks).items()):
        writes[holders[number % len(holders)]].append(place)
        if len(holders) > 1:
            for rank in holders:
                hashes[rank].add(place)
    return tuple(
        Assigned(name=name, infos=infos, writes=tuple(own), hashes=frozenset(compared))
        for own, compared in zip(writes, hashes, strict=True)
    )


def metadata_of(infos: Sequence[TensorInfo], boxes: Mapping[str, Sequence[Box]], values: Mapping[str, Any]) -> Metadata:
    """A checkpoint in the terms of ``torch.distributed.checkpoint``. ``planner_data`` has the values."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        info.name: TensorStorageMetadata(
            properties=TensorProperties(dtype=torch_dtype(info.dtype)),
            size=torch.Size(info.shape),
            chunks=[chunk_of(box) for box in boxes.get(info.name, ())],
        )
        for info in infos
    }
    return Metadata(
        state_dict_metadata={**found, **{name: BytesStorageMetadata() for name in values}}, planner_data=dict(values)
    )


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.shape))
