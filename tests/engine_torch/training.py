"""What a rank does of a run: steps of a plan, and all that a test wants to see of them. No JAX is loaded here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from shardwright.checkpoint import OwnedBox, RunPoint, open_checkpoint, open_newest
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.layer_io import Params
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.lowering.gathering import Gathered
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.own_program.store import members_of
from shardwright.engine_torch.training import step as engine_step
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.state import State, boxes_of, initial_state, load_state, tensors_of
from shardwright.engine_torch.training.step import train_step
from shardwright.runs.background import Saver
from shardwright.runs.metrics.records import StepMetrics
from shardwright.training.optimizer import FIRST, OptimizerOptions
from shardwright.training.options import Silent

CPU = torch.device("cpu")
COMPARED_STEPS = 2
"""The number of steps whose gradients are returned: the first, and the first after an update."""

NamedBox = tuple[str, Box, np.ndarray]
"""A box of a tensor of the state, with the tensor's name in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """The run of one rank: its boxes of the initial state, and of the gradients before clipping of the first steps; the
    metrics of each step; and the box and a digest of each of its parameters after the last step, by key."""

    initial: tuple[NamedBox, ...]
    gradients: tuple[tuple[NamedBox, ...], ...]
    steps: tuple[StepMetrics, ...]
    digests: dict[str, tuple[Box | None, str]]


def model_of(plan: Plan) -> Model:
    ranks = ranks_of(plan, CPU)
    return Model(plan, ranks)


def train(plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]) -> RankRun:
    """A step of a plan on each of the batches, whose rows are in the plan's order, from the initial values."""
    model = model_of(plan)
    state = initial_state(model, seed)
    initial = _boxes(state)
    feed, step = feed_of(plan, dist.get_rank(), CPU), train_step(plan, options)
    steps: list[StepMetrics] = []
    with _recorded_gradients() as gradients:
        for batch in batches:
            own = feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()})
            until_update = Unchanged(state)
            steps.append(step(state, own, until_update))
            assert until_update.seen
    return RankRun(initial=initial, gradients=tuple(gradients), steps=tuple(steps), digests=_digests(model))


class Unchanged:
    """Requires that the state has not changed, where a step says that it changes it next: until then a save may copy it."""

    def __init__(self, state: State) -> None:
        self.seen = False
        self._before = [(one, _array(one).tobytes()) for one in boxes_of(state)]

    def __call__(self) -> None:
        self.seen = True
        for one, elements in self._before:
            assert _array(one).tobytes() == elements, f"'{one.name}' was changed before the update"


def kept_after(
    plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]
) -> tuple[tuple[NamedBox, ...], tuple[NamedBox, ...]]:
    """The boxes of a rank's state before the first step, and after a step on each of the batches."""
    state = initial_state(model_of(plan), seed)
    before = _boxes(state)
    feed, step = feed_of(plan, dist.get_rank(), CPU), train_step(plan, options)
    for batch in batches:
        step(state, feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()}))
    return before, _boxes(state)


def gone_on(
    plan: Plan,
    seed: int,
    options: OptimizerOptions,
    batches: Sequence[dict[str, np.ndarray]],
    before: Path | None,
    after: Path | None,
    weights_only: bool = False,
) -> tuple[list[float], tuple[NamedBox, ...]]:
    """Losses of a step on each of the batches, and the boxes of a rank's state at the end. ``before``: the folder of the checkpoint that it
    begins with, or with whose weights, in place of the initial state; ``after``: of the one that it saves."""
    model = model_of(plan)
    state = initial_state(model, seed)
    if before is not None:
        state = load_state(model, open_newest(before), weights_only=weights_only)
    feed, step = feed_of(plan, dist.get_rank(), CPU), train_step(plan, options)
    losses = []
    for batch in batches:
        own = feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()})
        losses.append(step(state, own).loss)
    if after is not None:
        request = plan.request
        point = RunPoint(
            step=state.step,
            seed=seed,
            data_position=0,
            model=request.table.name,
            layout_name=request.layout.name,
            layout_text="",
            mesh=dict(plan.mesh.shape),
        )
        with Saver(after, members_of(None), Silent(), keep=None, asynchronous=True) as saver:
            saver.save(point, tensors_of(plan), boxes_of(state))
    return losses, _boxes(state)


def loaded(plan: Plan, folder: Path) -> tuple[NamedBox, ...]:
    """The boxes of a rank's state after it was read from a checkpoint. Padding is zero."""
    model = model_of(plan)
    state = load_state(model, open_checkpoint(folder))
    for one in model.weights:
        for array in (local_of(model.parameters()[one.key]), state.first[one.key], state.second[one.key]):
            in_update = array is state.first[one.key] or array is state.second[one.key]
            held = one.update_box(plan.mesh, dist.get_rank()) if in_update else one.box(plan.mesh, dist.get_rank())
            saved = one.saved_box(plan.mesh, dist.get_rank(), in_update=in_update)
            rest = array.detach().clone()
            if held is not None and saved is not None:
                rest[saved.within(held).slices] = 0
            assert not rest.any(), one.key
    return _boxes(state)


@contextmanager
def _recorded_gradients() -> Iterator[list[tuple[NamedBox, ...]]]:
    """A context that records the gradients of this rank in the first steps, before clipping."""
    found: list[tuple[NamedBox, ...]] = []
    right = engine_step.gradients_of

    def recorded(model: Model, batch: Mapping[str, torch.Tensor]) -> engine_step.Gradients:
        result = right(model, batch)
        if len(found) < COMPARED_STEPS:
            found.append(_gradients(model, result.by_key))
        return result

    engine_step.gradients_of = recorded
    try:
        yield found
    finally:
        engine_step.gradients_of = right


def _gradients(model: Model, by_key: Mapping[str, torch.Tensor]) -> tuple[NamedBox, ...]:
    """The gradients of a rank, by weight, in the boxes of a moment."""
    as_state = State(model, 0)
    as_state.kept = {FIRST: dict(by_key)}
    return tuple(
        (name.removeprefix(FIRST), box, array) for name, box, array in _boxes(as_state) if name.startswith(FIRST)
    )


def _boxes(state: State) -> tuple[NamedBox, ...]:
    # Copied: on a CPU they share the memory of the parameters, which the steps change.
    return tuple((one.name, one.box, _wide(_array(one))) for one in boxes_of(state))


def _array(one: OwnedBox) -> np.ndarray:
    return one.array() if callable(one.array) else one.array


def _bytes(array: torch.Tensor) -> bytes:
    return array.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _wide(bits: np.ndarray) -> np.ndarray:
    """The numbers with these bits, as float32: a bfloat16 is the upper half of a float32."""
    if bits.dtype.itemsize == 4:
        return bits.view(np.float32).copy()
    return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _digests(model: Model) -> dict[str, tuple[Box | None, str]]:
    parameters = model.parameters()
    return {
        one.key: (
            one.box(model.plan.mesh, model.ranks.rank),
            hashlib.sha256(_bytes(local_of(parameters[one.key]))).hexdigest(),
        )
        for one in model.weights
    }


def tied_sums(plan: Plan) -> tuple[str, float, float]:
    """The gradient of a tied embedding that is used twice, in the sum of its elements and in this sum divided by 1024: its dtype
    on this rank, its smallest and its largest element."""
    model = model_of(plan)
    initial_state(model, 0)

    def used_twice(params: Params) -> torch.Tensor:
        weight = params["embedding.tokens"]
        first = model.only.links.use("embedding.tokens", weight)
        second = model.only.links.use("embedding.tokens", weight, "logits")
        assert first.dtype == second.dtype == torch.bfloat16
        return first.float().sum() + second.float().sum() / 1024

    innermost = model.only.root
    while isinstance(innermost.inside, Gathered):
        innermost = innermost.inside
    innermost._compute = used_twice
    model.only.root().backward()
    gradient = model.parameters()["embedding.tokens"].grad
    assert gradient is not None
    local = local_of(gradient)
    return str(local.dtype), float(local.min()), float(local.max())
