"""Saves the tensors and values of a user's own program, by one process or several, and opens what was saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from shardwright.checkpoint import (
    Checkpoint,
    CheckpointError,
    Keep,
    OwnedBox,
    RunPoint,
    TensorInfo,
    open_checkpoint,
    open_newest,
    open_step,
)
from shardwright.checkpoint.format.manifest import PROGRAM
from shardwright.checkpoint.retention.rules import rules_of
from shardwright.checkpoint.writing.save import require_name
from shardwright.core.findings.errors import InputError
from shardwright.runs.own_program.held import HeldTensor
from shardwright.runs.own_program.members import Members
from shardwright.runs.own_program.replicas import boxes_to_write
from shardwright.runs.own_program.values import decoded, merged
from shardwright.runs.saving import save
from shardwright.storage.url import Place, parsed_place

VALUES = "values"
"""The key of a checkpoint's metadata that holds its values; ``PROGRAM`` says which framework saved it."""
MOST_STEPS = 10**18
TORCH, JAX, STATE_DICT = "torch", "jax", "dcp"
"""The frameworks: of a module, of a pytree, and of a state dict that ``torch.distributed.checkpoint`` has saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramState:
    """What one process holds of the state of a program. ``values``: JSON values. ``name``: of the program, for people."""

    held: Sequence[HeldTensor]
    values: Mapping[str, Any]
    framework: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToWrite:
    """What one process writes of a state: its boxes, and what all processes know alike."""

    point: RunPoint
    infos: Sequence[TensorInfo]
    boxes: Sequence[OwnedBox]


def save_program(
    folder: Place | str,
    state: ProgramState,
    *,
    step: int,
    members: Members,
    keep: Keep,
    metrics: Mapping[str, float] | None = None,
) -> Place:
    """Write the checkpoint of a step, and return its directory. Every process calls this, with what it holds.

    ``keep``, ``metrics``: which older checkpoints are kept, and by which numbers; those of process 0 count.

    Raises CheckpointError in all processes, with nothing saved: the step was saved before, replicas differ, boxes do not cover a
    tensor exactly once, a process cannot read or write.
    """
    found = to_write(state, step, members, keep=keep, metrics=metrics)
    return save(parsed_place(folder), found.point, found.infos, iter(found.boxes), members, keep=keep)


def program_point(
    step: int, name: str, metadata: Mapping[str, Any], metrics: Mapping[str, float] | None = None
) -> RunPoint:
    """The state of a program that has no layout and no seed of ours. ``name``: of the program, for people."""
    return RunPoint(
        step=step,
        seed=0,
        data_position=0,
        model=name,
        layout_name="none",
        layout_text="",
        mesh={},
        metadata=metadata,
        metrics=metrics or {},
    )


def to_write(
    state: ProgramState, step: int, members: Members, *, keep: Keep, metrics: Mapping[str, float] | None
) -> ToWrite:
    """What this process writes of a state. Processes may hold different tensors, as stages do.

    Raises CheckpointError in all processes where replicas differ, or processes have different tensors of one name, and where the
    rules look at a metric that the save does not have.
    """
    step = members.here("the step", lambda: whole_step(step))
    metrics = members.here("which checkpoints are kept", lambda: _numbers(keep, metrics or {}))
    own = members.here("the names of tensors", lambda: _by_name(state.held))
    infos = _infos_of_all(own, members)
    joined = merged(state.values, members)
    boxes = boxes_to_write(own, [info.name for info in infos], members)
    point = program_point(step, state.name, {PROGRAM: state.framework, VALUES: joined}, metrics)
    return ToWrite(point=point, infos=infos, boxes=boxes)


def whole_step(step: Any) -> int:
    """The number of a step, also of one that NumPy or JAX has counted. Raises InputError for what is none."""
    try:
        found = None if isinstance(step, bool) else index(step)
    except TypeError:
        found = None
    if found is None or not 0 <= found < MOST_STEPS:
        raise InputError(f"step is {step!r:.80}, and must be a whole number from 0 to {MOST_STEPS - 1:,}.")
    return found


def _numbers(keep: Keep, metrics: Mapping[str, Any]) -> Mapping[str, float]:
    """The metrics as numbers of Python, also of those that are one element of NumPy, JAX or PyTorch. Raises as ``rules_of``."""
    found = {
        name: value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
        for name, value in metrics.items()
    }
    rules_of(keep, found)
    return found


def open_program(folder: Place | str, step: int | None, members: Members) -> Checkpoint:
    """The checkpoint of a step, or of the newest one. One process chooses it, and all open it.

    ``folder``: what ``save`` was given, or the directory of one step. Raises CheckpointError in all processes: there is none, or it
    is damaged.
    """

    def chosen() -> str:
        if members.index:
            return ""
        place = parsed_place(folder)
        checkpoint = open_newest(place) if step is None else open_step(place, whole_step(step))
        return str(checkpoint.directory)

    directory = members.all_do("the checkpoint to load", chosen)[0]
    return members.here("opening the checkpoint", lambda: open_checkpoint(directory))


def values_of(
    checkpoint: Checkpoint, framework: str, of_state_dict: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The values of a checkpoint that a program of ``framework`` saved, decoded.

    ``of_state_dict``: makes them of the values of a state dict by their flattened names, which ``torch.distributed.checkpoint``
    has saved. Those of another framework are none of a program of this one: only tensors have names in both.
    """
    found = checkpoint.point.metadata.get(VALUES)
    saved_by = checkpoint.point.metadata.get(PROGRAM)
    if saved_by is None or not isinstance(found, dict):
        raise CheckpointError(
            f"{checkpoint.directory}: it has no values of a program of your own: a run of shardwright train saved it, or an import. "
            f"Its tensors can be read with shardwright.checkpoint.open_checkpoint.",
            code="SW504",
        )
    if saved_by == framework:
        return decoded(found)
    return of_state_dict(decoded(found) if saved_by == STATE_DICT else {})


def _by_name(held: Sequence[HeldTensor]) -> Mapping[str, HeldTensor]:
    found: dict[str, HeldTensor] = {}
    for one in held:
        require_name(one.info.name)
        if one.info.name in found:
            raise CheckpointError(
                f"two tensors are called '{one.info.name}'. Give each a name of its own.", code="SW504"
            )
        found[one.info.name] = one
    return found


def _infos_of_all(own: Mapping[str, HeldTensor], members: Members) -> list[TensorInfo]:
    """The tensors of all processes, those of the first process first."""
    here = [[one.info.name, list(one.info.shape), one.info.dtype, one.info.spec] for one in own.values()]
    different = members.distinct(here)
    found: dict[str, TensorInfo] = {}
    origins: dict[str, int] = {}
    for one in different:
        process = one.process
        for name, shape, dtype, spec in one.value:
            info = TensorInfo(name=name, shape=tuple(shape), dtype=dtype, spec=spec)
            before = found.setdefault(name, info)
            origins.setdefault(name, process)
            if (before.shape, before.dtype) != (info.shape, info.dtype):
                raise CheckpointError(
                    f"'{name}' is {before.dtype} {before.shape} on {members.named([origins[name]])} and {info.dtype} "
                    f"{info.shape} on {members.named([process])}. If each is a shard of its own, say so in its placements, or "
                    f"give each a name of its own. Nothing was saved.",
                    code="SW502",
                )
    return list(found.values())
