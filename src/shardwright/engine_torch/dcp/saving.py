"""``torch.distributed.checkpoint.save`` into our checkpoints: exact boxes, digests, an atomic commit, and no pickle.

DCP gathers what each rank declares on one rank, which assigns every box to a writer; all ranks write; the first one commits.
Replicas are hashed by every rank that holds one, and compared before the commit.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from shardwright.checkpoint import Keep, OwnedBox, Save, commit, join_save, saving, write_part
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.dcp.plan import (
    Assigned,
    Declared,
    Place,
    assigned,
    chunk_of,
    declared,
    holders_of,
    infos_of,
    metadata_of,
    require_readable,
    tensors_in,
    values_of,
)
from shardwright.engine_torch.own_program.shards import Shards, boxes_of, raw_of
from shardwright.runs.own_program.held import HeldShard, digest, read
from shardwright.runs.own_program.members import alone
from shardwright.runs.own_program.replicas import refusal
from shardwright.runs.own_program.store import STATE_DICT, VALUES, program_point
from shardwright.runs.own_program.values import encoded, with_keys
from shardwright.storage.url import parsed_place


class SavePlanner(DefaultSavePlanner):
    """Plans a save with the boxes that each rank really holds. ``save(..., planner=SavePlanner(), storage_writer=StorageWriter(...))``."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._tensors: Mapping[str, Shards] = {}

    def create_local_plan(self) -> SavePlan:
        """Raises InputError for a tensor that a checkpoint does not hold, CheckpointError for a value that is not JSON."""
        self._tensors = tensors_in(self.state_dict)
        values = {
            name: encoded(one, f"'{name}'")
            for name, one in self.state_dict.items()
            if not isinstance(one, torch.Tensor)
        }
        here = declared(self._tensors, values)
        items = [self._item((name, box)) for name, boxes in here.boxes.items() for box in boxes]
        self.plan = SavePlan(items, planner_data=here)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        ranks = [_declared(plan) for plan in all_plans]
        require_readable(ranks)
        infos, values, holders = infos_of(ranks), values_of(ranks), holders_of(ranks)
        boxes: dict[str, list[Box]] = {info.name: [] for info in infos}
        for name, box in holders:
            boxes[name].append(box)
        plans = [
            replace(plan, items=_written(plan, own), planner_data=own)
            for plan, own in zip(all_plans, assigned(ranks, infos, ""), strict=True)
        ]
        self.global_plan, self.metadata = plans, metadata_of(infos, boxes, values)
        return plans, self.metadata

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.elements(place_of(write_item))

    def elements(self, place: Place) -> torch.Tensor:
        """A box that this rank holds, on its device."""
        name, box = place
        one = self._tensors[name]
        local = next(each.local for each in boxes_of(one) if each.box == box)
        return one.local[local.slices]

    def _item(self, place: Place) -> WriteItem:
        name, box = place
        one = self._tensors[name]
        properties = TensorProperties(dtype=one.dtype)
        return WriteItem(
            index=MetadataIndex(name, box.start),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk_of(box), properties=properties, size=torch.Size(one.shape)),
        )


class StorageWriter(storage.StorageWriter):
    """Writes the checkpoint of a step into ``folder``, atomically.

    ``step``: or give ``save`` a ``checkpoint_id`` that ends in the step's number, as ``step-100``; its other characters do
    not matter. ``keep``: how many of the newest checkpoints are kept, or rules other than ``best``; None keeps all. Needs a
    ``SavePlanner`` of ours.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int | None = None, *, keep: Keep = None) -> None:
        self._folder, self._step, self._keep = parsed_place(folder), step, keep
        self._saving: ExitStack | None = None
        self._save: Save | None = None
        self._is_first = False
        self._rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._end()
        if checkpoint_id is not None:
            self._step = step_in(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del args
        self._end()
        if self._step is None:
            raise InputError("StorageWriter: give the step, or a checkpoint_id that ends in its number, as step-100.")
        if kwargs.get("use_collectives", True) is False:
            raise InputError("StorageWriter: use_collectives=False saves without a commit of all ranks. Leave it out.")
        self._is_first, self._rank = is_coordinator, int(kwargs.get("rank", 0) or 0)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        _declared(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, of which all ranks are given the name."""
        assert self._step is not None
        self._saving = ExitStack()
        self._save = self._saving.enter_context(saving(self._folder, self._step))
        return [
            replace(plan, storage_data=rank, planner_data=replace(_assigned(plan), name=self._save.name))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: planning.SavePlanner) -> Future[list[WriteResult]]:
        assert self._step is not None
        if not isinstance(planner, SavePlanner):
            _refuse()
        own, rank = _assigned(plan), int(plan.storage_data)
        digests: dict[Place, str] = {}
        boxes = [_box(planner, place, own.hashes, digests) for place in own.writes]
        try:
            save = self._save or join_save(self._folder, self._step, own.name)
            write_part(save, own.infos, boxes, process=rank)
            for place in sorted(own.hashes - set(own.writes)):
                digests[place] = digest(_read(planner, place))
        except BaseException:
            self._end()
            raise
        done: Future[list[WriteResult]] = Future()
        results = [
            WriteResult(
                index=MetadataIndex(place[0], place[1].start), size_in_bytes=0, storage_data=(place, digests.get(place))
            )
            for place in {**dict.fromkeys(own.writes), **digests}
        ]
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Compare replicas and commit. Raises CheckpointError where replicas differ; nothing is then saved."""
        assert self._save is not None
        assert self._step is not None
        try:
            _require_equal(results)
            values = {PROGRAM: STATE_DICT, VALUES: with_keys(metadata.planner_data)}
            point = program_point(self._step, "state dict", values)
            commit(self._save, point, num_processes=len(results), keep=self._keep)
        finally:
            self._end()

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._folder))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path alone: a step needs the folder of its run."""
        del checkpoint_id
        return False

    def _end(self) -> None:
        """End the save: what was not committed is deleted."""
        opened, self._saving, self._save = self._saving, None, None
        if opened is not None:
            opened.close()


def step_in(checkpoint_id: str | os.PathLike[str]) -> int:
    """The step at the end of a path. Raises InputError where there is none.

    >>> step_in("outputs/checkpoint/step-100")
    100
    """
    name = Path(checkpoint_id).name
    found = re.search(r"([0-9]{1,18})$", name)
    if found is None:
        raise InputError(f"checkpoint_id: '{name}' does not end in the number of a step, as step-100 does.")
    return int(found[1])


def place_of(item: WriteItem) -> Place:
    assert item.tensor_data is not None
    start = tuple(item.tensor_data.chunk.offsets)
    return item.index.fqn, Box(start, tuple(a + b for a, b in zip(start, item.tensor_data.chunk.sizes, strict=True)))


def _box(planner: SavePlanner, place: Place, hashed: frozenset[Place], digests: dict[Place, str]) -> OwnedBox:
    def array() -> Any:
        elements = _read(planner, place)
        if place in hashed:
            digests[place] = digest(elements)
        return elements

    return OwnedBox(name=place[0], box=place[1], array=array)


def _read(planner: SavePlanner, place: Place) -> Any:
    return read(place[0], HeldShard(place[1], lambda: raw_of(planner.elements(place))))


def _require_equal(results: list[list[WriteResult]]) -> None:
    by_place: dict[Place, dict[str, list[int]]] = {}
    for rank, one in enumerate(results):
        for result in one:
            place, found = result.storage_data
            if found is not None:
                by_place.setdefault(place, {}).setdefault(found, []).append(rank)
    parties = {place: sorted(ranks.values()) for place, ranks in by_place.items() if len(ranks) > 1}
    if parties:
        raise refusal([(name, str(box), found) for (name, box), found in parties.items()], alone("rank"))


def _written(plan: SavePlan, own: Assigned) -> list[WriteItem]:
    places = set(own.writes)
    return [item for item in plan.items if place_of(item) in places]


def _declared(plan: SavePlan) -> Declared:
    if not isinstance(plan.planner_data, Declared):
        _refuse()
    return plan.planner_data


def _assigned(plan: SavePlan) -> Assigned:
    assert isinstance(plan.planner_data, Assigned)
    return plan.planner_data


def _refuse() -> NoReturn:
    raise InputError(
        "StorageWriter needs the planner that knows which rows a rank holds: save(..., planner=SavePlanner()), from "
        "shardwright.engine_torch.dcp."
    )
