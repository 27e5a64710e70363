"""Training steps, compiled once a test process and run on tokens that anyone can make again.

The families have their test sizes, with fewer layers (two of each kind that they have several of) and rows of 32
tokens: neither takes away a kind of tensor or of movement. DeepSeek's experts are 96 wide and its values 64, so that
nothing else that moves has their shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import jax
import numpy as np

from shardwright.cli.values import mesh_sizes
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.request import Request
from shardwright.engine_jax.mesh import device_mesh
from shardwright.engine_jax.optimizer import BETA_1, OptimizerOptions
from shardwright.engine_jax.state import abstract_state, initial_state
from shardwright.engine_jax.step import abstract_batch, batch_sharding, train_step
from shardwright.layouts import load_layout
from shardwright.models import build

LENGTH, STEPS, SEED = 32, 20, 0
OPTIONS = OptimizerOptions(lr=1e-3, warmup=2, steps=STEPS, weight_decay=0.1, clip=0.5)
"""The norms of all these gradients are above 0.5, so that every step is clipped."""

SIZES = {
    "llama3-test": {"num_layers": "2"},
    "mixtral-test": {"num_layers": "2"},
    "deepseek3-test": {"num_layers": "3", "expert_mlp": "96", "value_dim": "64"},
}

QUICKLY = {"xla_cpu_use_fusion_emitters": False}
"""These programs run for seconds: half the time to make machine code of them is what counts. How they are partitioned,
and so what they compute and move, stays as it is."""

Batch = Mapping[str, np.ndarray]
Gradients = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model under a layout: what a step is compiled for. ``mesh`` as on the command line."""

    model: str
    layout: str
    mesh: str
    rows: int = 8
    micro_steps: int = 1

    def __str__(self) -> str:
        rows = "" if self.rows == 8 else f" {self.rows} rows"
        micro = "" if self.micro_steps == 1 else f" {self.micro_steps} micro-steps"
        return f"{self.layout} {self.mesh}{rows}{micro}"

    @property
    def alone(self) -> Case:
        """The same rows of the same model on one device."""
        return Case(model=self.model, layout="fsdp", mesh="fsdp=1", rows=self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What steps told: per step the mean loss, the norm of its gradients before clipping and its valid tokens.

    ``gradients``: of steps 1 and 2, before clipping, by weight, layers stacked.
    """

    losses: np.ndarray
    norms: np.ndarray
    tokens: np.ndarray
    gradients: tuple[Gradients, ...]


@cache
def plan_of(case: Case) -> Plan:
    """The plan of a case, which has no errors."""
    plan = make_plan(
        Request(
            layout=load_layout(case.layout),
            table=build(case.model, SIZES[case.model]),
            batch=case.rows,
            length=LENGTH,
            mesh_sizes=mesh_sizes(case.mesh),
            micro_steps=case.micro_steps,
        )
    )
    assert not plan.errors, plan.errors
    return plan


def compiled_step(case: Case) -> jax.stages.Compiled:
    """The training step of a case."""
    return _compiled(case, 1)


def unoptimised_step(case: Case) -> jax.stages.Compiled:
    """The same, to be looked at and not run: the same partitions in poor machine code, which is made in a third of the
    time."""
    return _compiled(case, 0)


@cache
def _compiled(case: Case, level: int) -> jax.stages.Compiled:
    plan = plan_of(case)
    mesh = device_mesh(plan.mesh)
    lowered = train_step(plan, mesh, OPTIONS).lower(abstract_state(plan, mesh), abstract_batch(plan, mesh))
    return lowered.compile(compiler_options={**QUICKLY, "xla_backend_optimization_level": level})


@cache
def run_of(case: Case) -> Run:
    """``STEPS`` steps of a case from the initial values on."""
    return run_on(case, [tokens_of(number, case.rows) for number in range(STEPS)])


def run_on(case: Case, batches: Sequence[Batch]) -> Run:
    """A step of a case on each of the batches, from the initial values on."""
    plan = plan_of(case)
    mesh = device_mesh(plan.mesh)
    step, sharding = compiled_step(case), batch_sharding(plan, mesh)
    state = initial_state(plan, mesh, SEED)
    told: list[list[float]] = []
    moments: list[Gradients] = []
    for number, batch in enumerate(batches):
        state, metrics = step(state, {name: jax.device_put(array, sharding) for name, array in batch.items()})
        told.append([np.asarray(value).item() for value in metrics])
        if number < 2:
            moments.append({name: np.asarray(array, np.float64) for name, array in state.first.items()})
    losses, norms, tokens = np.asarray(told).T
    return Run(losses=losses, norms=norms, tokens=tokens, gradients=_gradients(moments, norms))


def _gradients(moments: Sequence[Gradients], norms: np.ndarray) -> tuple[Gradients, ...]:
    """The gradients that AdamW's first moments were made of: g = (m - b m_before) / (1 - b), over the clipping."""
    before = {name: np.zeros_like(array) for name, array in moments[0].items()}
    gradients: list[Gradients] = []
    for after, norm in zip(moments, norms, strict=False):
        share = OPTIONS.clip / max(norm, OPTIONS.clip) * (1 - BETA_1)
        gradients.append({name: (array - BETA_1 * before[name]) / share for name, array in after.items()})
        before = after
    return tuple(gradients)


def tokens_of(step: int, rows: int, vocab: int = 2048) -> Batch:
    """Rows of a step, no two alike in how many valid tokens they have, each kind elsewhere in every step.

    One row is padding and nothing else, one is almost, the others hold one, two or three documents. Tokens follow
    Zipf's law, so that there is something to learn.
    """
    rng = np.random.default_rng([step, rows])
    ends = [[LENGTH], [], [3], [5, 6, LENGTH], [LENGTH - 7], [11, LENGTH], [1, 20], [30, LENGTH]]
    shape = (rows, LENGTH)
    positions, segments, valid = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for row in range(rows):
        start = 0
        for number, end in enumerate(ends[(row + step) % rows]):
            positions[row, start:end] = np.arange(end - start)
            segments[row, start:end] = number + 1
            valid[row, start : end - 1] = True
            start = end
    words = np.minimum(rng.zipf(1.3, (rows, LENGTH + 1)), vocab) - 1
    tokens, targets = words[:, :-1].astype(np.int32), words[:, 1:].astype(np.int32)
    return {"tokens": tokens, "targets": targets, "positions": positions, "segments": segments, "valid": valid}


def assert_trains_as(case: Case, other: Case, tolerance: float) -> None:
    """Losses of every step and gradients of steps 1 and 2, held against those of another case."""
    ours, theirs = run_of(case), run_of(other)
    assert np.all(theirs.norms > OPTIONS.clip), theirs.norms
    assert theirs.losses[-1] < theirs.losses[0] - 1, theirs.losses
    assert_same_losses(ours, theirs, tolerance)
    for our, their in zip(ours.gradients, theirs.gradients, strict=True):
        assert_same_gradients(our, their)


def assert_same_losses(ours: Run, theirs: Run, tolerance: float) -> None:
    """Every step's loss within ``tolerance``, relative; and the same tokens counted."""
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerance, atol=0)


def assert_same_gradients(ours: Gradients, theirs: Gradients, tolerance: float = 1e-4) -> None:
    """|ours - theirs| / |theirs| of every weight, layer by layer where layers are stacked."""
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        for layer, (our, their) in enumerate(zip(_layers(name, ours[name]), _layers(name, array), strict=True)):
            size = np.linalg.norm(their)
            difference = np.linalg.norm(our - their)
            assert size > 0, f"{name}, layer {layer}: no gradient at all"
            assert difference <= tolerance * size, f"{name}, layer {layer}: {difference / size:.2e} of {size:.2e}"


def _layers(name: str, array: np.ndarray) -> np.ndarray:
    """The gradient of each layer as a row; a weight outside the stacks is one row."""
    return array.reshape(array.shape[0] if "layers." in name else 1, -1)
