"""One rank's step on tensors without values: what it does, and the bytes that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.model.optimizer import AVERAGE
from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.delayed import FACTOR, HISTORY
from shardwright.core.schedules.actions import Action
from shardwright.engine_torch.dry_run.counting import CountedCollective, Counting, of_weights
from shardwright.engine_torch.dry_run.kernels import kernels_of_a_gpu
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.private import without_values
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.precision.delayed import Kept
from shardwright.engine_torch.training.state import State, rest_as_codes, shape_in_update
from shardwright.engine_torch.training.step import changed
from shardwright.models.layers.decoder import walk_of
from shardwright.training.optimizer import OptimizerOptions, decayed_names

FIELDS = ("tokens", "positions", "segments", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imagined:
    """The collectives of a rank's step, and how often each; its bytes at rest, and its peak memory, on the device and on the host.

    ``of_microbatch``: the collectives of one microbatch that is neither the first nor the last, and ``saved_bytes``: what it holds between
    its passes; of a step of which some actions are such a microbatch's."""

    collectives: tuple[tuple[CountedCollective, int], ...]
    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    average_bytes: int
    batch_bytes: int
    peak_bytes: int
    host_bytes: int = 0
    of_microbatch: tuple[tuple[CountedCollective, int], ...] = ()
    saved_bytes: int = 0

    @property
    def state_bytes(self) -> int:
        """What it holds between two steps."""
        return self.weights_bytes + self.moments_bytes + self.average_bytes


def imagined_model(plan: Plan, ranks: Ranks, only: Collection[int] | None = None) -> Model:
    """The model of a rank, or ``only`` some of its stages, whose weights have no values. Products of codes are those of the plan's chip."""
    chip, meta = plan.request.chip, torch.device("meta")
    return Model(plan, ranks, weights_on=meta, how_many=evenly, only=only, products_on=chip and chip.device)


def imagined_step(model: Model, rows: int, before: Collection[Action] = (), after: Collection[Action] = ()) -> Imagined:
    """A step of a model whose weights have no values yet, on ``rows`` rows of all ranks. ``before``, ``after``: the actions of one
    microbatch, until it is saved and from then on."""
    plan = model.plan
    options = OptimizerOptions(steps=1, lr=1e-4, warmup=0, weight_decay=0.1, clip=1.0)
    named = {
        key: owner for stage in model.stages.values() for key, owner in of_weights(stage.groups, plan.mesh).items()
    }
    counting = Counting(plan.mesh, named)
    own: Counter[CountedCollective] = Counter()
    saved = 0

    @contextmanager
    def watching(action: Action) -> Iterator[None]:
        nonlocal saved
        counted, held = Counter(counting.counted), counting.held.now
        yield
        if action in before or action in after:
            own.update(Counter(counting.counted) - counted)
        if action in before:
            saved += counting.held.now - held

    model.watching = watching
    with without_values(), kernels_of_a_gpu(counting.held), counting, counting.held.watching():
        model.to_empty(device=model.ranks.device)
        state = _state(model)
        # The amaxes of weights that rest as codes, with which a state is made, are of no step.
        counting.counted.clear()
        at_rest = _bytes(_weights_at_rest(model))
        batch = _batch(plan, rows, model.ranks.rank)
        gradients, norm = changed(state, batch, options, decayed_names(plan))
        sizes = {key: gradient.element_size() for key, gradient in gradients.by_key.items()}
        held = _held_elements(model)
        del norm
    kept = {prefix: _bytes(arrays.values()) for prefix, arrays in state.kept.items()}
    averages = kept.pop(AVERAGE.prefix, 0)
    frozen = sum(_bytes(stage.frozen.values()) for stage in model.stages.values())
    return Imagined(
        collectives=tuple(counting.counted.items()),
        weights_bytes=at_rest + frozen,
        gradients_bytes=sum(held[key] * size for key, size in sizes.items()),
        moments_bytes=sum(kept.values()),
        average_bytes=averages,
        batch_bytes=_bytes(batch.values()),
        peak_bytes=counting.held.peak,
        host_bytes=counting.on_host.peak,
        of_microbatch=tuple(own.items()),
        saved_bytes=max(0, saved),
    )


def evenly(counts: torch.Tensor, total: int) -> list[int]:
    """``total`` divided into as many integers as there are counts, as equal as possible.

    >>> evenly(torch.zeros(4), 10)
    [3, 3, 2, 2]
    """
    each, more = divmod(total, counts.shape[0])
    return [each + (number < more) for number in range(counts.shape[0])]


def _state(model: Model) -> State:
    state = State(model, 0)
    parameters = model.parameters()
    for kept in model.plan.request.kept:
        for one in model.weights:
            shape = shape_in_update(one, local_of(parameters[one.key]), model.ranks)
            state.kept[kept.prefix][one.key] = torch.zeros(shape, dtype=torch_dtype(str(kept.dtype)))
    for stage in model.stages.values():
        for row in stage.plan.weights:
            if stage.plan.request.table.weight(row.name).frozen:
                shape = row.shape if row.stack is None else (row.num, *row.shape)
                stage.frozen[row.name] = torch.zeros(shape, dtype=torch_dtype(row.dtype))
        rank, mesh = stage.ranks.rank, stage.plan.mesh
        boxes = {one.name: shard_box(one.spec, mesh, one.shape, rank) for one in stage.plan.delayed_tensors}
        arrays = {name: torch.zeros(box.shape) for name, box in boxes.items() if box is not None}
        stage.delayed = {
            one.name: Kept.of(arrays[FACTOR + one.name], arrays[HISTORY + one.name]) for one in stage.plan.delayed
        }
    rest_as_codes(model, state)
    return state


def _weights_at_rest(model: Model) -> Iterator[torch.Tensor]:
    """The weights of a rank, or the arrays that it has in place of them."""
    groups = {key: group for stage in model.stages.values() for key, group in stage.resting.items()}
    for key, one in model.parameters().items():
        if key in groups:
            yield from (array for copy in groups[key].resting[key] for array in copy)
        else:
            yield local_of(one)


def _held_elements(model: Model) -> dict[str, int]:
    """Elements of the gradient of each weight while it is summed over microbatches."""
    held = {key: local_of(one) for key, one in model.parameters().items()}
    for one in model.updated:
        held |= one.held_parts(held)
    return {key: shard.numel() for key, shard in held.items()}


def _batch(plan: Plan, rows: int, rank: int) -> Mapping[str, torch.Tensor]:
    box = shard_box(
        plan.by_name[walk_of(plan.request.table.architecture).fields["tokens"].row].in_use,
        plan.mesh,
        (rows, plan.request.length),
        rank,
    )
    assert box is not None
    fields = {name: torch.zeros(box.shape, dtype=torch.int32) for name in FIELDS}
    return {**fields, "valid": torch.ones(box.shape, dtype=torch.bool)}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
