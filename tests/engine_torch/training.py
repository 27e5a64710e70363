"""What a rank does of a run: steps of a plan, and all that a test wants to see of them. No JAX is loaded here."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from shardwright.checkpoint import OwnedBox
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.layer_io import Params
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.lowering.gathering import Gathered
from shardwright.engine_torch.lowering.links import links_of
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.training import step as engine_step
from shardwright.engine_torch.training.feed import feed_of
from shardwright.engine_torch.training.state import State, boxes_of, initial_state
from shardwright.engine_torch.training.step import train_step
from shardwright.runs.engine import StepMetrics
from shardwright.training.optimizer import FIRST, OptimizerOptions

CPU = torch.device("cpu")
LOOKED_AT = 2
"""The steps whose gradients are told: the first, and the first after an update."""

Part = tuple[str, Box, np.ndarray]
"""A box of a tensor of the state, by the name that a checkpoint gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Of one rank: its boxes of the initial state, those of the gradients before clipping of the first steps, what each
    step told, and of each of its parameters the box and a digest after the last one, by key."""

    initial: tuple[Part, ...]
    gradients: tuple[tuple[Part, ...], ...]
    steps: tuple[StepMetrics, ...]
    digests: dict[str, tuple[Box | None, str]]


def model_of(plan: Plan) -> Model:
    ranks = ranks_of(plan, CPU)
    return Model(plan, links_of(plan, ranks), ranks)


def train(plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]) -> Told:
    """A step of a plan on each of the batches, as their rows lie, from the initial values on."""
    model = model_of(plan)
    state = initial_state(model, seed)
    initial = _parts(state)
    feed, step = feed_of(plan, dist.get_rank(), CPU), train_step(plan, options)
    steps: list[StepMetrics] = []
    with _seen_gradients() as gradients:
        for batch in batches:
            own = feed.on_device({name: array[list(feed.offsets)] for name, array in batch.items()})
            steps.append(step(state, own))
    return Told(initial=initial, gradients=tuple(gradients), steps=tuple(steps), digests=_digests(model))


@contextmanager
def _seen_gradients() -> Iterator[list[tuple[Part, ...]]]:
    """While steps are made: the gradients of the first of them, before clipping, of this rank."""
    found: list[tuple[Part, ...]] = []
    right = engine_step.gradients_of

    def seen(model: Model, batch: Mapping[str, torch.Tensor]) -> engine_step.Gradients:
        result = right(model, batch)
        if len(found) < LOOKED_AT:
            found.append(_gradients(model, result.by_key))
        return result

    engine_step.gradients_of = seen
    try:
        yield found
    finally:
        engine_step.gradients_of = right


def _gradients(model: Model, by_key: Mapping[str, torch.Tensor]) -> tuple[Part, ...]:
    """The gradients of a rank, by weight: boxes as those of a moment."""
    shown = State(model, 0)
    shown.first = shown.second = dict(by_key)
    return tuple((name.removeprefix(FIRST), box, array) for name, box, array in _parts(shown) if name.startswith(FIRST))


def _parts(state: State) -> tuple[Part, ...]:
    # Copied: on a CPU they are the parameters' own memory, which the steps change.
    return tuple((one.name, one.box, _wide(_array(one))) for one in boxes_of(state))


def _array(one: OwnedBox) -> np.ndarray:
    return one.array() if callable(one.array) else one.array


def _bytes(array: torch.Tensor) -> bytes:
    return array.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _wide(bits: np.ndarray) -> np.ndarray:
    """The numbers whose bits these are, in float32: a bfloat16 is the first half of one."""
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
    """The gradient of a tied embedding that is used twice: the sum of its elements, and of them by 1024. Its dtype on this rank,
    its least and its largest element."""
    model = model_of(plan)
    initial_state(model, 0)

    def used_twice(given: Params, batch: object) -> torch.Tensor:
        del batch
        weight = given["embedding.tokens"]
        first = model.links.use("embedding.tokens", weight)
        second = model.links.use("embedding.tokens", weight, "logits")
        assert first.dtype == second.dtype == torch.bfloat16
        return first.float().sum() + second.float().sum() / 1024

    innermost = model.root
    while isinstance(innermost.inside, Gathered):
        innermost = innermost.inside
    innermost._compute = used_twice
    model.root(None).backward()
    cotangent = model.parameters()["embedding.tokens"].grad
    assert cotangent is not None
    local = local_of(cotangent)
    return str(local.dtype), float(local.min()), float(local.max())
