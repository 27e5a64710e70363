"""Training steps of a case, compiled once a test process, and the differences of two runs.

The families have their test sizes, with fewer layers (two of each kind that they have several of) and rows of 32
tokens. They still have every kind of tensor and of collective. DeepSeek's experts have width 96 and its values 64, so that no
other tensor of a collective has their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from shardwright.cli.typed.values import mesh_sizes, moves, settings
from shardwright.core.boxes.box import Box
from shardwright.core.layout.layout import Layout
from shardwright.core.model.table import Weight
from shardwright.core.pipeline.program import padded_stacks
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import options_of, preset
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import State, Tensor, abstract_state, make_state
from shardwright.engine_jax.training.step import abstract_batch, batch_sharding, train_step
from shardwright.init import box_values
from shardwright.layouts import load_layout, preset_names
from shardwright.layouts.policy_file import load_policy
from shardwright.models import build
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_jax.made_rows import LENGTH, Batch, head_tail, tokens_of
from tests.sameness.own_layouts import own_layout

STEPS, FEW_STEPS = 20, 3
"""The steps of a run, and of most runs of the tests. The last of these follows an update with the full learning rate. The
tables of ``docs/`` are of all 20."""

OPTIONS = OptimizerOptions(lr=1e-3, warmup=2, steps=STEPS, weight_decay=0.1, clip=0.5)
"""The norms of all these gradients are above 0.5, so that every step is clipped."""

GRADIENTS = 1e-4
"""The largest allowed difference from the gradient of one device, relative to its norm."""

BETA_1 = 0.9
"""Of AdamW, whose first moments show the gradients."""

SIZES = {
    "llama3-test": {"num_layers": "2"},
    "mixtral-test": {"num_layers": "2"},
    "deepseek3-test": {"num_layers": "3", "expert_mlp": "96", "value_dim": "64"},
}

SEEDS: Mapping[tuple[str, int, str], int] = {
    ("deepseek3-test", 8, ""): 3,
    ("deepseek3-test", 8, "capacity_factor=1.25"): 1,
}
"""Seeds of the initial values, by model, rows and settings; 0 for the others.

Two experts' scores for a token may be so close that the last bit of a sum decides between them, and then two runs diverge.
With these seeds the margin of every token is at least 1.5e-6, on one device, in all steps.
"""

POLICY_FILES = Path(__file__).parents[1] / "sameness"

Gradients = Mapping[str, np.ndarray]


def recipe_of(text: str) -> Recipe:
    """The preset of that name, with the options and settings that follow it, as ``nvfp4 high_layers=1``."""
    name, *given = text.split()
    values = {key: int(value) for key, value in (one.split("=") for one in given)}
    options = {key: value for key, value in values.items() if key in options_of(name)}
    settings: dict[str, Any] = {key: value for key, value in values.items() if key not in options}
    return replace(preset(name, **options), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model under a layout, for which a step is compiled.

    ``mesh``, ``move``, ``settings`` and ``stages`` as on the command line. ``layout``: a preset's name, or one of ``own_layouts``.
    ``balanced``: rows are in head-tail order over the devices that shard them. ``precision``: a recipe as ``recipe_text`` has it,
    or none. ``remat``: a policy of recomputation, or the name of a file of ``sameness/``.
    """

    model: str
    layout: str
    mesh: str
    rows: int = 8
    microbatches: int = 1
    settings: str = ""
    move: str = ""
    balanced: bool = False
    precision: str = ""
    stages: str = ""
    loss_chunks: int = 1
    remat: str = "full"

    def __str__(self) -> str:
        return " ".join(
            [
                self.layout,
                self.mesh,
                *([] if self.rows == 8 else [f"{self.rows} rows"]),
                *([] if self.microbatches == 1 else [f"{self.microbatches} microbatches"]),
                *([self.move] if self.move else []),
                *(["head-tail"] if self.balanced else []),
                *([self.settings] if self.settings else []),
                *([self.precision] if self.precision else []),
                *([self.stages] if self.stages else []),
                *([f"{self.loss_chunks} chunks of the loss"] if self.loss_chunks > 1 else []),
                *([] if self.remat == "full" else [self.remat]),
            ]
        )

    @property
    def alone(self) -> Case:
        """The same rows of the same model on one device, in one microbatch."""
        return Case(
            model=self.model,
            layout="fsdp",
            mesh="fsdp=1",
            rows=self.rows,
            settings=self.settings,
            precision=self.precision,
        )

    @property
    def seed(self) -> int:
        """The seed of the initial values: one for all layouts of the same rows and model."""
        return SEEDS.get((self.model, self.rows, self.settings), 0)

    @property
    def experts(self) -> bool:
        return not self.model.startswith("llama3")

    @property
    def tolerance(self) -> float:
        """The largest allowed relative difference of a loss from one device: a last bit may change a router's choice."""
        return 1e-4 if self.experts else 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The metrics of steps: the mean loss, the gradient norm before clipping and the number of valid tokens of each.

    ``gradients``: of steps 1 and 2, before clipping, by weight, layers stacked.
    """

    losses: np.ndarray
    norms: np.ndarray
    tokens: np.ndarray
    gradients: tuple[Gradients, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The largest relative difference of a loss, and of one layer's gradient of a weight, with its name."""

    loss: float
    gradient: float
    weight: str


def layout_of(case: Case) -> Layout:
    layout = load_layout(case.layout) if case.layout in preset_names() else own_layout(case.layout)
    how = moves(case.move) if case.move else {}
    return replace(
        layout,
        move_attention=how.get("attention", layout.move_attention),
        move_moe=how.get("moe", layout.move_moe),
    )


@cache
def plan_of(case: Case) -> Plan:
    """The plan of a case, which has no errors."""
    given = settings([[case.settings]]) if case.settings else {}
    plan = make_plan(
        Request(
            layout=layout_of(case),
            table=build(case.model, {**SIZES[case.model], **given}),
            batch=case.rows,
            length=LENGTH,
            mesh_sizes=mesh_sizes(case.mesh),
            microbatches=case.microbatches,
            load_balanced=case.balanced,
            precision=recipe_of(case.precision) if case.precision else None,
            stages=case.stages or None,
            loss_chunks=case.loss_chunks,
            remat=load_policy(POLICY_FILES / case.remat) if case.remat.endswith(".yaml") else case.remat,
        )
    )
    assert not plan.errors, plan.errors
    return plan


@cache
def compiled_step(case: Case) -> jax.stages.Compiled:
    """The training step of a case."""
    return compile_plan(plan_of(case))


def compile_plan(
    plan: Plan, level: int = 0, options: OptimizerOptions = OPTIONS, **of_xla: bool | str
) -> jax.stages.Compiled:
    """The training step of a plan, at an optimization level of XLA: 0 for few steps, 1 for many."""
    mesh = device_mesh(plan.mesh)
    lowered = train_step(plan, mesh, options).lower(abstract_state(plan, mesh), abstract_batch(plan, mesh))
    of_compiler: dict[str, Any] = {"xla_backend_optimization_level": level, **of_xla}
    return lowered.compile(compiler_options=of_compiler)


@cache
def run_of(case: Case, num_steps: int = FEW_STEPS) -> Run:
    """The first steps of a case, from the initial values."""
    return run_on(case, batches_of(case, num_steps))


def batches_of(case: Case, num_steps: int = STEPS) -> list[Batch]:
    """The rows of the first steps of a case, in the order of the text."""
    vocab = plan_of(case).request.table.sizes["vocab"]
    return [tokens_of(number, case.rows, vocab) for number in range(num_steps)]


def run_on(case: Case, batches: Sequence[Batch]) -> Run:
    """A step of a case on each of the batches, from the initial values."""
    return run_plan(plan_of(case), compiled_step(case), batches, case.seed)


def row_order(plan: Plan) -> np.ndarray:
    """The positions in the text of a row's tokens, in the order in which the devices of a plan shard the row.

    Under Ulysses each device attends over full rows for some heads, which is equal work in any order.
    """
    if not plan.request.load_balanced or plan.request.layout.move_attention == "ulysses":
        return np.arange(plan.request.length)
    return head_tail(plan.request.length, plan.mesh.size(plan.cp))


def in_row_order(batch: Batch, plan: Plan) -> Batch:
    """A batch with its rows in ``row_order``."""
    order = row_order(plan)
    return {name: array[:, order] for name, array in batch.items()}


Watch = Callable[[State, Batch], object]
"""A function that receives the state before each step, and the step's rows in ``row_order``."""


def run_plan(
    plan: Plan, step: jax.stages.Compiled, batches: Sequence[Batch], seed: int, watch: Watch | None = None
) -> Run:
    """A compiled step of a plan on each of the batches, from the initial values."""
    mesh = device_mesh(plan.mesh)
    sharding = batch_sharding(plan, mesh)
    state: State = make_state(plan, mesh, partial(_initial_boxes, plan, seed), 0)
    metrics_of_steps: list[list[float]] = []
    moments: list[Gradients] = []
    for number, batch in enumerate(batches):
        ordered = in_row_order(batch, plan)
        if watch is not None:
            watch(state, ordered)
        placed = {name: jax.device_put(array, sharding) for name, array in ordered.items()}
        state, metrics = step(state, placed)
        metrics_of_steps.append(
            [np.asarray(value).item() for value in (metrics.loss, metrics.grad_norm, metrics.tokens)]
        )
        assert metrics.overflow == 0
        if number < 2:
            moments.append(
                {name: without_padding(plan, name, np.asarray(array)) for name, array in state.first.items()}
            )
    losses, norms, tokens = np.asarray(metrics_of_steps).T
    return Run(losses=losses, norms=norms, tokens=tokens, gradients=_gradients(moments, norms))


def _initial_boxes(plan: Plan, seed: int, tensor: Tensor, boxes: Sequence[Box]) -> list[np.ndarray]:
    """What ``initial_state`` reads, made once for all layouts of a model: `test_initial_state.py` shows that boxes have its bits."""
    if not tensor.is_of_the_weight:
        return [np.full(box.shape, tensor.first, tensor.dtype) for box in boxes]
    whole = _initial_values(plan.request.table.weight(tensor.weight), seed, tensor.saved)
    return [whole[box.slices] for box in boxes]


@lru_cache(maxsize=200)
def _initial_values(weight: Weight, seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return box_values(weight, seed, Box.whole(shape))


def without_padding(plan: Plan, name: str, array: np.ndarray) -> np.ndarray:
    """An array of the state without the padding of its vocabulary, which must be zero; in stages, with its layers in their order and
    without the padding of stages that have fewer layers, which must be zero too."""
    stack = plan.by_name[name].stack
    if plan.pipeline is not None and stack is not None:
        layers = padded_stacks(plan.request.table, plan.pipeline.choice)[stack].layers
        rows = {layer: row for row, layer in enumerate(layers) if layer is not None}
        padding = [row for row, layer in enumerate(layers) if layer is None]
        assert not array[padding].any(), name
        array = array[[rows[layer] for layer in range(len(rows))]]
    shape = plan.by_name[name].stacked_saved_shape
    inside = Box.whole(shape).slices
    if array.shape != shape:
        rest = array.copy()
        rest[inside] = 0
        assert not rest.any(), name
    return array[inside].astype(np.float64)


def _gradients(moments: Sequence[Gradients], norms: np.ndarray) -> tuple[Gradients, ...]:
    """The gradients from AdamW's first moments: g = (m - b m_before) / (1 - b), divided by the clipping factor."""
    before: Gradients | None = None
    gradients: list[Gradients] = []
    for after, norm in zip(moments, norms, strict=False):
        factor = OPTIONS.clip / max(norm, OPTIONS.clip) * (1 - BETA_1)
        new = after if before is None else {name: array - BETA_1 * before[name] for name, array in after.items()}
        gradients.append({name: (array / factor).astype(np.float32) for name, array in new.items()})
        before = after
    return tuple(gradients)


def assert_trains_as(case: Case, other: Case, num_steps: int = FEW_STEPS) -> None:
    """Losses of the first steps and gradients of steps 1 and 2 equal those of another case, within the tolerances."""
    assert_same(run_of(case, num_steps), run_of(other, num_steps), case.tolerance)


def assert_same(ours: Run, theirs: Run, tolerance: float) -> None:
    assert np.all(theirs.norms > OPTIONS.clip), theirs.norms
    assert len(theirs.losses) < STEPS or theirs.losses[-1] < theirs.losses[0] - 1, theirs.losses
    # The gradients first, and step 1 before step 2: they locate a fault.
    for our, their in zip(ours.gradients, theirs.gradients, strict=True):
        assert_same_gradients(our, their)
    assert_same_losses(ours, theirs, tolerance)


def assert_same_losses(ours: Run, theirs: Run, tolerance: float) -> None:
    """Every step's loss within ``tolerance``, relative; and the same tokens counted."""
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=tolerance, atol=0)


def assert_same_gradients(ours: Gradients, theirs: Gradients, tolerance: float = GRADIENTS) -> None:
    """|ours - theirs| / |theirs| of every weight, layer by layer where layers are stacked."""
    for name, difference in gradient_differences(ours, theirs).items():
        assert difference <= tolerance, f"{name}: off by {difference:.2e} of its norm"


def gradient_differences(ours: Gradients, theirs: Gradients) -> dict[str, float]:
    """|ours - theirs| / |theirs| by weight and layer. Every layer of every weight must have a gradient."""
    assert ours.keys() == theirs.keys()
    found: dict[str, float] = {}
    for name, array in theirs.items():
        for layer, (our, their) in enumerate(zip(_layers(name, ours[name]), _layers(name, array), strict=True)):
            size = np.linalg.norm(their)
            assert size > 0, f"{name}, layer {layer}: no gradient at all"
            found[f"{name}, layer {layer}"] = float(np.linalg.norm(our - their) / size)
    return found


def difference(ours: Run, theirs: Run) -> Difference:
    """The largest differences of two runs."""
    pairs = zip(ours.gradients, theirs.gradients, strict=True)
    by_weight = [item for our, their in pairs for item in gradient_differences(our, their).items()]
    weight, largest = max(by_weight, key=lambda item: np.nan_to_num(item[1], nan=np.inf))
    loss = np.max(np.abs(ours.losses - theirs.losses) / theirs.losses)
    return Difference(loss=float(loss), gradient=largest, weight=weight)


def _layers(name: str, array: np.ndarray) -> np.ndarray:
    """The gradient of each layer as a row; a weight outside the stacks is one row."""
    return array.reshape(array.shape[0] if "layers." in name else 1, -1)
