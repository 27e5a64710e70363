"""``torch.distributed.checkpoint.load`` from our checkpoints: each rank reads the boxes that it really holds, verified, and no others."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint import planner as planning
from torch.distributed.checkpoint import storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.futures import Future

from shardwright.checkpoint import Checkpoint
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import chosen, names_of
from shardwright.engine_torch.dcp.plan import Declared, declared, metadata_of, require_readable, tensors_in
from shardwright.engine_torch.dcp.saving import step_in
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.shards import Shards, boxes_of, tensor_of
from shardwright.engine_torch.own_program.tied import in_one_place, require_equal, tied_in, unlike
from shardwright.runs.own_program.fitting import misfits, require_none, value_misfits
from shardwright.runs.own_program.members import alone
from shardwright.runs.own_program.store import STATE_DICT, VALUES, open_program
from shardwright.runs.own_program.values import decoded, without_marks
from shardwright.storage.url import parsed_place


class LoadPlanner(DefaultLoadPlanner):
    """Plans a load of the boxes that each rank really holds. ``load(..., planner=LoadPlanner(), storage_reader=StorageReader(...))``.

    Names, shapes and dtypes must be equal; of a tensor that is in the state under several names, as a tied weight, the checkpoint may have any of
    them. ``only``: patterns of the flattened names to load (``*`` stands for any text); everything else keeps its values.
    ``cast``: floating dtypes may differ.
    """

    def __init__(self, *, only: Sequence[str] | None = None, cast: bool = False) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self._only, self._cast = only, cast
        self._tensors: Mapping[str, Shards] = {}

    def create_local_plan(self) -> LoadPlan:
        """Raises CheckpointError that names every tensor and value that does not fit."""
        assert self.metadata is not None
        checkpoint = self.metadata.storage_data
        if not isinstance(checkpoint, Checkpoint):
            raise InputError("LoadPlanner reads from shardwright.engine_torch.dcp.StorageReader: give load both.")
        names = chosen(self.state_dict, self._only)
        tensors = tensors_in({name: one for name, one in self.state_dict.items() if name in names})
        values = [name for name in self.state_dict if name in names and name not in tensors]
        others = in_one_place(tensors)
        tied = tied_in(checkpoint, others)
        self._tensors = {name: one for name, one in tensors.items() if name not in others}
        read_as = {name: tied.read_as.get(name, name) for name in self._tensors}
        wanted = {read_as[name]: (one.shape, one.dtype_name) for name, one in self._tensors.items()}
        partial = self._only is not None
        repeated = {other: first for other, first in tied.repeated.items() if other != first}
        lines = misfits(checkpoint, wanted, unread=repeated, cast=self._cast, partial=partial)
        lines += unlike(checkpoint, repeated)
        lines += value_misfits(self.metadata.planner_data or {}, values, partial=partial)
        require_none(checkpoint, lines, cast=self._cast, partial=partial)
        for other, first in repeated.items():
            require_equal(checkpoint, other, replace(tensors[other], name=first), None)
        items = [
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(name, each.box.start),
                dest_offsets=torch.Size(each.local.start),
                storage_index=MetadataIndex(read_as[name], (0,) * len(each.box.start)),
                storage_offsets=torch.Size(each.box.start),
                lengths=torch.Size(each.box.shape),
            )
            for name, one in self._tensors.items()
            for each in boxes_of(one)
            if each.box.size
        ]
        return LoadPlan(items + [_value_item(name) for name in values], planner_data=declared(tensors, {}))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        require_readable([plan.planner_data for plan in global_plan])
        return global_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value, which is JSON, in its place in the state dict."""
        name = read_item.dest_index.fqn
        place: Any = self.original_state_dict
        path = self.mappings[name]
        for key in path[:-1]:
            place = place[_key(place, key)]
        place[_key(place, path[-1])] = decoded(json.loads(value.getvalue()))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        one = self._tensors[read_item.dest_index.fqn]
        start = tuple(read_item.dest_offsets)
        stop = tuple(first + length for first, length in zip(start, read_item.lengths, strict=True))
        return one.local[Box(start, stop).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """There is nothing to do: ``resolve_tensor`` returned the rank's own memory."""
        del read_item, tensor


class StorageReader(storage.StorageReader):
    """Reads the checkpoint of a step in ``folder``: the newest one, or ``step``, or the one at the end of ``checkpoint_id``.

    Needs a ``LoadPlanner`` of ours.
    """

    def __init__(self, folder: str | os.PathLike[str], step: int | None = None) -> None:
        self._folder, self._step = parsed_place(folder), step
        self._checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._checkpoint = None
        if checkpoint_id is not None:
            self._step = step_in(checkpoint_id)

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """The tensors and values of the checkpoint. What is wrong with it is raised later, where DCP does not hide it."""
        del args
        try:
            self._checkpoint = open_program(self._folder, self._step, alone("rank"))
            metadata = metadata_of(tuple(self._checkpoint.tensors.values()), {}, _saved_values(self._checkpoint))
        except (InputError, OSError) as error:
            return Metadata(state_dict_metadata={}, storage_data=error)
        return replace(metadata, storage_data=self._checkpoint)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args, kwargs
        if isinstance(metadata.storage_data, Exception):
            raise metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        if not isinstance(plan.planner_data, Declared):
            raise InputError(
                "StorageReader needs the planner that knows which rows a rank holds: load(..., planner=LoadPlanner()), from "
                "shardwright.engine_torch.dcp."
            )
        assert self._checkpoint is not None
        return replace(plan, storage_data=str(self._checkpoint.directory))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found = sorted({plan.storage_data for plan in plans})
        if len(found) > 1:
            raise InputError(f"the ranks have found other checkpoints: {names_of(found)}. Give all the same step.")
        return plans

    def read_data(self, plan: LoadPlan, planner: planning.LoadPlanner) -> Future[None]:
        """Raises DamagedError for damaged bytes, after which the state is partly loaded."""
        assert self._checkpoint is not None
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                value = _saved_values(self._checkpoint)[name]
                planner.load_bytes(item, io.BytesIO(json.dumps(value).encode()))
                continue
            start = tuple(item.storage_offsets)
            box = Box(start, tuple(first + length for first, length in zip(start, item.lengths, strict=True)))
            target = planner.resolve_tensor(item).detach()
            dtype = torch_dtype(self._checkpoint.tensors[name].dtype)
            target.copy_(tensor_of(self._checkpoint.read_box(name, box, raw=True), dtype))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never chosen by a path alone: a step needs the folder of its run."""
        del checkpoint_id
        return False


def _saved_values(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The JSON values of a checkpoint that DCP's calls have saved; none of any other."""
    metadata = checkpoint.point.metadata
    values = metadata.get(VALUES)
    return without_marks(values) if metadata.get(PROGRAM) == STATE_DICT and isinstance(values, dict) else {}


def _value_item(name: str) -> ReadItem:
    nothing = torch.Size((0,))
    index = MetadataIndex(name)
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=index,
        dest_offsets=nothing,
        storage_index=index,
        storage_offsets=nothing,
        lengths=nothing,
    )


def _key(place: MutableMapping[Any, Any] | list[Any], key: str | int) -> Any:
    """The key of a container that DCP has made ``key`` of: all keys of mappings are texts there."""
    if isinstance(place, list) or key in place:
        return key
    return next((one for one in place if str(one) == key), key)
