"""Saving a run, by one process or by several. Several finish each phase of the save before any begins the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import TypeVar, cast

from shardwright.checkpoint import (
    CheckpointError,
    Keep,
    OwnedBox,
    RunPoint,
    Save,
    TensorInfo,
    commit,
    join_save,
    save_checkpoint,
    saving,
    write_part,
)
from shardwright.checkpoint.folder.names import step_directory
from shardwright.runs.processes.group import Exchanging
from shardwright.storage.url import Place


def save(
    out: Place,
    point: RunPoint,
    infos: Sequence[TensorInfo],
    boxes: Iterator[OwnedBox],
    group: Exchanging,
    *,
    keep: Keep,
    run: str | None = None,
) -> Place:
    """Write a state as the checkpoint of its step. Each distinct box is written once, and its elements are read only then.

    Each process of the group writes its own boxes; process 0 commits when all are written. Raises CheckpointError in all
    processes, with no incomplete checkpoint left, where one of them cannot write. ``run``: as of ``checkpoint.saving``.
    """
    if group.count == 1:
        return save_checkpoint(out, point, infos, boxes, keep=keep, run=run)
    return _save_together(out, point, infos, boxes, group, keep, run)


def _save_together(
    out: Place,
    point: RunPoint,
    infos: Sequence[TensorInfo],
    boxes: Iterator[OwnedBox],
    group: Exchanging,
    keep: Keep,
    run: str | None,
) -> Place:
    """The three phases of a save by several processes. Each begins when all processes have finished the one before."""
    name, first = f"the checkpoint of step {point.step}", group.index == 0
    # Process 0 leaves the save only after all processes have the result: leaving deletes what is not committed.
    with ExitStack() as stack:
        begun = begin_together(out, point.step, group, stack, run)
        all_or_none(group, f"{name}, write", lambda: write_part(begun, infos, boxes, process=group.index))
        return all_or_none(
            group,
            f"{name}, commit",
            lambda: (
                commit(begun, point, num_processes=group.count, keep=keep) if first else step_directory(out, point.step)
            ),
        )


def begin_together(out: Place, step: int, group: Exchanging, stack: ExitStack, run: str | None = None) -> Save:
    """A new save, the same in all processes. Process 0 holds it as long as its ``stack``."""
    name = f"the checkpoint of step {step}"
    begun = all_or_none(
        group, f"{name}, begin", lambda: stack.enter_context(saving(out, step, run=run)) if group.index == 0 else None
    )
    # Process 0 is the first to give a value.
    joined: str = group.exchange(f"{name}, name", None if begun is None else begun.name)[0].value
    return all_or_none(group, f"{name}, join", lambda: begun or join_save(out, step, joined))


class WithdrawnError(CheckpointError):
    """Process 0 has ended a save, and deleted what there was of it, before this process had written its part.

    What failed is process 0's to say: this error is only its consequence.
    """


Result = TypeVar("Result")


def all_or_none(group: Exchanging, name: str, do: Callable[[], Result]) -> Result:
    """The result of ``do``, once it has succeeded in every process.

    Raises the CheckpointError of ``do`` if it failed here; if it failed in another process, or if the one here is a consequence of
    that, one that names that process.
    """
    result, error = None, None
    try:
        result = do()
    except CheckpointError as raised:
        error = raised
    errors = group.exchange(name, None if error is None else str(error))
    if error is not None and not isinstance(error, WithdrawnError):
        raise error
    for value, process in errors:
        if value is not None:
            first, *lines = value.split("\n")
            raise CheckpointError(
                f"{name}: process {process} of {group.count} could not do it. Its error: {first}", lines=lines
            )
    return cast(Result, result)
