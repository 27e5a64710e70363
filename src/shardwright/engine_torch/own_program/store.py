"""Saves a user's own module with its optimizer, sharded in whatever way, and loads it on any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright.checkpoint import Checkpoint, CheckpointError, DamagedError, Keep
from shardwright.checkpoint.exchange.passing import Together, together_or_alone
from shardwright.checkpoint.exchange.wants import Want, wants_of
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.held import Reading
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import chosen
from shardwright.engine_torch.io.exchange import RankCarrier, device_of
from shardwright.engine_torch.own_program.holding import Optimizers
from shardwright.engine_torch.own_program.moments import NewMoments, moments_of, names_in, new_moments
from shardwright.engine_torch.own_program.naming import AVERAGE, instead_of, named_averages, named_in
from shardwright.engine_torch.own_program.recipes import BY_RECIPE, NoticesLoads, shown
from shardwright.engine_torch.own_program.shards import (
    Shards,
    boxes_of,
    fill,
    held,
    readings,
    require_memory,
    shards_of,
)
from shardwright.engine_torch.own_program.tied import require_equal, tied_in, unlike, with_tied
from shardwright.engine_torch.own_program.waiting import BeforeSteps
from shardwright.runs import Reads
from shardwright.runs.own_program.background import BackgroundSaves
from shardwright.runs.own_program.entries import TIED
from shardwright.runs.own_program.fitting import misfits, require_none, value_misfits
from shardwright.runs.own_program.members import Members, alone, connected
from shardwright.runs.own_program.store import TORCH, ProgramState, open_program, save_program, values_of
from shardwright.runs.own_program.values import Reference, encoded, mapping, with_keys
from shardwright.storage.url import Place

MOST_RANKS = 512
"""With more ranks, each reads for itself: the lists of the boxes of all would be long."""

Averages = nn.Module | Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a load has read besides tensors: the step, and the values that the save was given.

    ``kept``: the tensors of the program that were not asked for, and have the values that they had.
    """

    step: int
    values: Mapping[str, Any]
    kept: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A load that was compared with the checkpoint and may begin.

    ``tied``: tensors by another of their names, under which the checkpoint has them too. ``ids``: of the module's tensors that are loaded.
    ``take``: what ranks do together with what was read instead of tensors of the module.
    """

    tensors: tuple[Shards, ...]
    tied: Mapping[str, Shards]
    moments: NewMoments | None
    take: tuple[Callable[[], None], ...]
    extra: Mapping[str, Any]
    ids: frozenset[int]
    loaded: Loaded


def save(
    folder: Place | str,
    module: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int,
    averages: Averages | None = None,
    values: Mapping[str, Any] | None = None,
    keep: Keep = None,
    metrics: Mapping[str, float] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Place:
    """Save a module, its optimizer and averages of its weights as the checkpoint of a step, and return its directory.

    Every rank of ``group`` (by default all) calls this, whether its tensors are sharded by ``parallelize``, ``fully_shard`` and
    tensor parallelism, or are the same on all ranks. Each box is written once, by a rank that holds it. Replicas are compared.

    ``averages``: a ``torch.optim.swa_utils.AveragedModel``, or tensors by the names of the weights. ``values``: JSON values, as
    the position in the data and the state of a scheduler; ranks may give other keys, not other values. ``keep``: how many of the
    newest checkpoints are kept, or rules (``Retention``); None keeps all. ``metrics``: finite numbers of the step, as its loss.

    Raises, in all ranks and with nothing saved: InputError for a tensor that has no values or is partial or sparse, CheckpointError
    for replicas that differ, for what is neither a tensor nor a JSON value, and for what cannot be written.
    """
    members = members_of(group)
    state = state_of(module, optimizer, averages, values, members)
    return save_program(folder, state, step=step, members=members, keep=keep, metrics=metrics)


class Saver(BackgroundSaves):
    """Saves a module with its optimizer into a folder while training goes on; a context.

    Each rank copies the boxes that it writes to host memory, and a thread writes the copy. ``folder``, ``keep`` and ``group``: as for
    ``save``. Every rank makes one and calls its methods, as it calls ``save``.

    ``overlap=True``: for a program whose parameters, and what the optimizer keeps for them, change in the optimizer's step only. They are copied
    during the next forward and backward pass, and the step of the optimizer that was saved first waits for what is left. Before any
    other change the program calls ``wait_copied``. Buffers, parameters without gradients and averages are copied at once.
    """

    def __init__(
        self,
        folder: Place | str,
        *,
        keep: Keep = None,
        group: dist.ProcessGroup | None = None,
        overlap: bool = False,
    ) -> None:
        super().__init__(folder, members_of(group), keep=keep)
        self._overlap = overlap
        self._waits: BeforeSteps | None = None

    def save(
        self,
        module: nn.Module,
        optimizer: Optimizers | None = None,
        *,
        step: int,
        averages: Averages | None = None,
        values: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> Place:
        """Begin to save the checkpoint of a step, and return the directory that it will have. Arguments are those of ``save``.

        Returns when the state is copied, or, with ``overlap=True``, what of it may change before the optimizer's step. Waits for the save before,
        if that is not complete.

        Raises as the function ``save`` does, and CheckpointError for a save before that failed.
        """
        if self._overlap and optimizer is not None and (self._waits is None or not self._waits.of(optimizer)):
            self._waits = BeforeSteps(optimizer, self._saver)
        state = state_of(module, optimizer, averages, values, self._members, overlap=self._overlap)
        return self.save_state(state, step, metrics)


def state_of(
    module: nn.Module,
    optimizer: Optimizers | None,
    averages: Averages | None,
    values: Mapping[str, Any] | None,
    members: Members,
    *,
    overlap: bool = False,
) -> ProgramState:
    """What this rank holds of a program's state. ``overlap``: as of ``Saver``. Raises in all ranks as ``save`` does."""
    updated: set[str] = set()

    def state() -> tuple[list[Shards], Mapping[str, Any]]:
        named, average = named_in(module), named_averages(averages)
        tensors = [shards_of(name, one) for each in (named, average) for name, one in each.tensors.items()]
        found: dict[str, Any] = {
            "module": with_keys({**named.values, **average.values}),
            TIED: with_keys({**named.tied, **average.tied}),
            "own": encoded(mapping(values), "values"),
        }
        updated.update(
            name for name, one in named.tensors.items() if isinstance(one, nn.Parameter) and one.requires_grad
        )
        if optimizer is not None:
            moments = moments_of(optimizer, named)
            tensors += moments.tensors
            updated.update(one.name for one in moments.tensors)
            found["optimizer"] = moments.values
        return tensors, found

    shards, found = members.here("the state to save", state)
    read_as = readings(shards, members)
    return ProgramState(
        held=[
            held(one, read_as.get(one.name), "until the update" if overlap and one.name in updated else "now")
            for one in shards
        ],
        values=found,
        framework=TORCH,
        name=type(module).__name__,
    )


def load(
    folder: Place | str,
    module: nn.Module,
    optimizer: Optimizers | None = None,
    *,
    step: int | None = None,
    averages: Averages | None = None,
    only: Sequence[str] | None = None,
    cast: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint into a module, its optimizer and averages, in place, however they are sharded now. Every rank calls this.

    ``folder``: what ``save`` was given, or the directory of one step; a path, or a URL as a text. ``step``: the newest by default. Without ``optimizer`` or
    ``averages``, those of the checkpoint are not read. Names, shapes and dtypes must be equal. ``only``: patterns of the names
    to load (``*`` stands for any text); everything else keeps its values. ``cast``: floating dtypes may differ.

    Raises, in all ranks: CheckpointError that names every tensor that does not fit, with nothing loaded; DamagedError for damaged
    bytes, after which the module is partly loaded.
    """
    members = members_of(group)
    checkpoint = open_program(folder, step, members)
    job = members.here(
        "comparing the checkpoint with the module",
        lambda: _compared(checkpoint, module, optimizer, averages, only, cast=cast),
    )
    read_as = readings(job.tensors, members)
    source = _by_all(checkpoint, job.tensors, read_as, members, group)
    members.here(
        "reading the checkpoint",
        lambda: together_or_alone(source, lambda: _read(checkpoint, source, job, read_as)),
    )
    if job.moments is not None:
        job.moments.take()
    for take in job.take:
        take()
    if job.extra:
        module.load_state_dict(dict(job.extra), strict=False)
    for child in module.modules():
        if isinstance(child, NoticesLoads):
            child.notice_load(lambda tensor: id(tensor) in job.ids)
    return job.loaded


def members_of(group: dist.ProcessGroup | None) -> Members:
    """The ranks of a process group; this process alone where there is none. Raises InputError for a rank outside the group."""
    if not dist.is_available() or not dist.is_initialized():
        return alone("rank")
    index, count = dist.get_rank(group), dist.get_world_size(group)
    if index < 0:
        raise InputError("this rank is not in the group that was given, so it must not call save or load.")

    def gather(value: Any) -> list[Any]:
        found: list[Any] = [None] * count
        dist.all_gather_object(found, value, group=group)
        return found

    return connected(index, count, "rank", gather, (RuntimeError,))


def _values_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The values of a checkpoint. Those of a state dict may be extra state of the module, and are the caller's too."""
    return values_of(checkpoint, TORCH, lambda values: {"module": values, "own": values})


def _compared(
    checkpoint: Checkpoint,
    module: nn.Module,
    optimizer: Optimizers | None,
    averages: Averages | None,
    only: Sequence[str] | None,
    *,
    cast: bool,
) -> _Job:
    named, average, values = named_in(module), named_averages(averages), _values_of(checkpoint)
    others = instead_of(module, checkpoint.tensors)
    without = {name for other in others for name in other.without}
    read_besides = {name: tensor for other in others for name, tensor in other.read.items()}
    saved = values.get("optimizer")
    if optimizer is not None and saved is None:
        raise CheckpointError(
            f"{checkpoint.directory}: it has no optimizer's state. Load the module only.", code="SW504"
        )
    tensors = {name: one for name, one in named.tensors.items() if name not in without}
    program = {**tensors, **read_besides, **average.tensors}
    own_values = {**named.values, **average.values}
    all_names = [*program, *own_values, *(names_in(saved) if optimizer is not None and saved is not None else ())]
    names = chosen(all_names, only)
    tied = tied_in(checkpoint, {**named.tied, **average.tied})
    shards = [shards_of(tied.read_as.get(name, name), one) for name, one in program.items() if name in names]
    for one in shards:
        require_memory(one)
    unread = {} if saved is None else {one for kept in saved["state"].values() for one in _tensors(kept)}
    lines = misfits(
        checkpoint,
        {one.name: (one.shape, one.dtype_name) for one in shards},
        unread={
            *unread,
            *tied.repeated,
            *(name for other in others for name in other.unread),
            *(name for name in checkpoint.tensors if averages is None and name.startswith(AVERAGE)),
        },
        cast=cast,
        partial=only is not None,
    )
    repeated = {other: one for one in shards for other, first in tied.repeated.items() if first == one.name != other}
    lines = with_tied(lines, values.get(TIED, {}))
    lines += unlike(checkpoint, {other: one.name for other, one in repeated.items()})
    lines += _other_recipes(checkpoint, {name: one for name, one in program.items() if name in names})
    wanted_values = [name for name in own_values if name in names]
    lines += value_misfits(values["module"], wanted_values, partial=True)
    require_none(checkpoint, lines, cast=cast, partial=only is not None)
    moments = None
    if optimizer is not None and saved is not None:
        moments = new_moments(
            optimizer, named, saved, checkpoint.tensors, lambda name: name in names, partial=only is not None
        )
    return _Job(
        tensors=(*shards, *(moments.tensors if moments is not None else ())),
        tied=repeated,
        moments=moments,
        ids=frozenset(number for number, name in named.ids.items() if name in names),
        take=tuple(one.take for one in others if one.take is not None and names.issuperset(one.read)),
        extra={named.keys[name]: values["module"][name] for name in wanted_values if name in named.keys},
        loaded=Loaded(
            step=checkpoint.point.step,
            values=values["own"],
            kept=tuple(name for name in (*program, *own_values) if name not in names),
        ),
    )


def _other_recipes(checkpoint: Checkpoint, program: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each module whose recipe is another one than in the checkpoint, where both have what only one recipe understands."""
    lines = []
    for name, one in program.items():
        refusal = next((text for ending, text in BY_RECIPE.items() if name.endswith(ending)), None)
        if refusal is not None and name in checkpoint.tensors and checkpoint.tensors[name].shape == tuple(one.shape):
            theirs = torch.from_numpy(checkpoint.read_box(name, Box.whole(tuple(one.shape))).copy())
            if shown(theirs) != shown(one):
                lines.append(refusal(name, shown(theirs), shown(one)))
    return lines


def _tensors(kept: Mapping[str, Any]) -> list[str]:
    return [one.tensor for one in kept.values() if isinstance(one, Reference)]


def _by_all(
    checkpoint: Checkpoint,
    tensors: Sequence[Shards],
    read_as: Mapping[str, Reading],
    members: Members,
    group: dist.ProcessGroup | None,
) -> Reads:
    """What all ranks read together, where they load the same tensors: each tells the others which boxes it holds."""
    names = [one.name for one in tensors]
    if not 1 < members.count <= MOST_RANKS or len(members.distinct(names)) > 1:
        return checkpoint
    boxes = [[[each.box.start, each.box.stop] for each in boxes_of(one, read_as.get(one.name))] for one in tensors]
    of_all = members.gather(boxes)

    def wants(name: str) -> Sequence[Want]:
        number = names.index(name)
        return wants_of(
            (rank, Box(tuple(start), tuple(stop))) for rank, held in enumerate(of_all) for start, stop in held[number]
        )

    return Together(source=checkpoint, wants=wants, carrier=RankCarrier(device=device_of(group), group=group))


def _read(checkpoint: Checkpoint, source: Reads, job: _Job, read_as: Mapping[str, Reading]) -> None:
    for other, one in job.tied.items():
        require_equal(checkpoint, other, one, read_as.get(one.name))
    try:
        for one in job.tensors:
            fill(one, source, checkpoint.tensors[one.name].dtype, read_as.get(one.name))
    except DamagedError as error:
        first, *lines = error.message.split("\n")
        raise DamagedError(
            f"{first} The module is partly loaded: load another checkpoint before it is used.",
            lines=lines,
            code=error.code,
        ) from error
