"""The folder of a run's checkpoints, by its place. Every function is that of the place's ``Steps``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from shardwright.checkpoint.folder.in_store import InStore
from shardwright.checkpoint.folder.names import checkpoints_directory, step_of
from shardwright.checkpoint.folder.on_disk import OnDisk
from shardwright.checkpoint.folder.steps import Steps
from shardwright.storage.system import AnyPlace
from shardwright.storage.url import Place, local_path

ON_DISK, IN_STORE = OnDisk(), InStore()


def steps_at(place: AnyPlace) -> Steps[AnyPlace]:
    return cast(Steps[AnyPlace], IN_STORE if local_path(place) is None else ON_DISK)


def committed(out: Place, *, once: bool = False) -> tuple[Place, ...]:
    """``once``: where a step that one listing of a store leaves out does no harm."""
    directory = checkpoints_directory(out)
    return steps_at(directory).committed(directory, once=once)


def leftovers(out: Place) -> tuple[Place, ...]:
    directory = checkpoints_directory(out)
    return steps_at(directory).leftovers(directory)


def under_way(leftovers: Sequence[Place]) -> tuple[Place, ...]:
    """``leftovers``: of one folder."""
    return steps_at(leftovers[0]).under_way(leftovers) if leftovers else ()


def unknown(out: Place) -> tuple[Place, ...]:
    directory = checkpoints_directory(out)
    return steps_at(directory).unknown(directory)


def is_step(directory: Place) -> bool:
    """Whether a directory is one step's, by its name or by what is in it. Raises CheckpointError where a store cannot be read."""
    return step_of(directory) is not None or steps_at(directory).has_manifest(directory)


def is_gone(directory: Place) -> bool:
    return steps_at(directory).is_gone(directory)


def beside(step: Place) -> frozenset[Place]:
    return steps_at(step).beside(step)


def delete(step: Place) -> None:
    steps_at(step).delete(step)


def set_aside(step: Place, why: str) -> Place:
    """``why`` is ``damaged`` or ``set-aside``."""
    return steps_at(step).set_aside(step, why)
