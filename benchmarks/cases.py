"""The same model, layout and rows twice: Shardwright's step and the handwritten one, from the same initial values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.handwritten import deepseek3, llama3, mixtral
from benchmarks.handwritten import training as by_hand
from benchmarks.handwritten.sharding import layout as layout_by_hand
from benchmarks.handwritten.sharding import shardings_at_rest
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import typed_request
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import abstract_state, initial_state
from shardwright.engine_jax.training.step import abstract_batch, batch_sharding, train_step
from shardwright.training.optimizer import OptimizerOptions

OPTIONS = by_hand.Options(lr=1e-3, warmup=2, steps=1000, weight_decay=0.1, clip=1.0)
SEED = 0

Arrays = Mapping[str, jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training step, with options as on the command line. ``set``: differences from the published size."""

    model: str
    layout: str
    mesh: str
    rows: int = 8
    length: int = 128
    set: str | None = None
    move: str | None = None
    dtype: str = "float32"
    remat: str = "full"
    microbatches: int = 1
    schedule: str | None = None

    def __str__(self) -> str:
        extra = [each for each in (self.set, self.move) if each]
        extra += [self.dtype] if self.dtype != "float32" else []
        extra += [f"remat={self.remat}"] if self.remat != "full" else []
        extra += [f"{self.schedule}, {self.microbatches} microbatches"] if self.schedule else []
        return " ".join([self.model, self.layout, self.mesh, f"{self.rows}x{self.length}", *extra])

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.rows * self.length


@dataclass(slots=True)
class Running:
    """A compiled step with its state, the only mutable object here: a step replaces the state."""

    compiled: jax.stages.Compiled
    state: Any
    batch: Arrays

    def go(self) -> tuple[float, float]:
        """Runs one step to its end. Returns its loss and the norm of its gradients before clipping."""
        self.state, metrics = self.compiled(self.state, self.batch)
        return float(metrics.loss), float(metrics.grad_norm)


def plan_of(case: Case) -> Plan:
    """The plan of a case. Ends the command if the plan has errors."""
    options = PlanOptions(
        mesh=case.mesh,
        move=case.move,
        batch=case.rows,
        length=case.length,
        set=((case.set,),) if case.set else (),
        dtype=case.dtype,
        remat=case.remat,
    )
    plan = make_plan(typed_request(case.model, case.layout, options).request)
    if plan.errors:
        raise SystemExit(f"{case}: {plan.errors}")
    return plan


def rows_of(case: Case, vocab: int) -> Mapping[str, np.ndarray]:
    """Rows of two documents, of words that follow Zipf's law; a document's last token has no target."""
    rng = np.random.default_rng(SEED)
    shape = (case.rows, case.length)
    words = np.minimum(rng.zipf(1.3, (case.rows, case.length + 1)), vocab) - 1
    starts = rng.integers(case.length // 4, case.length // 2, case.rows)[:, None]
    columns = np.broadcast_to(np.arange(case.length), shape)
    second = columns >= starts
    return {
        "tokens": words[:, :-1].astype(np.int32),
        "targets": words[:, 1:].astype(np.int32),
        "positions": np.where(second, columns - starts, columns).astype(np.int32),
        "segments": np.where(second, 2, 1).astype(np.int32),
        "valid": columns != starts - 1,
    }


def ours(case: Case) -> Running:
    """Shardwright's step, compiled as ``shardwright train`` compiles it."""
    plan = plan_of(case)
    mesh = device_mesh(plan.mesh)
    step = train_step(plan, mesh, OptimizerOptions(**OPTIONS._asdict()))
    compiled = step.lower(abstract_state(plan, mesh), abstract_batch(plan, mesh)).compile()
    sharding = batch_sharding(plan, mesh)
    rows = rows_of(case, plan.request.table.sizes["vocab"])
    return Running(compiled, initial_state(plan, mesh, SEED), jax.device_put(dict(rows), sharding))


def handwritten(case: Case) -> Running:
    """The handwritten step. It gets initial values and shapes, and shards them by its own specs.

    These specs must be the plan's, so that the two steps are of the same layout.
    """
    plan = plan_of(case)
    mesh = device_mesh(plan.mesh)
    table = plan.request.table
    layout = layout_by_hand(case.layout, mesh)
    values = initial_state(plan, mesh, SEED)
    both = {**values.weights, **values.buffers}
    places = shardings_at_rest(layout, {name: array.shape for name, array in both.items()})
    for name, array in both.items():
        if not array.sharding.is_equivalent_to(places[name], array.ndim):
            raise AssertionError(f"{case}: {name} is stored as {array.sharding}, by hand as {places[name]}")
    decayed = frozenset(weight.name for weight in table.weights if len(weight.shape) > 1)
    optimizer = by_hand.adamw(OPTIONS, decayed)
    weights, biases = dict(values.weights), dict(values.buffers)
    state_places = by_hand.state_places(optimizer, weights, biases, layout)
    kept = jax.jit(optimizer.init, out_shardings=state_places.optimizer)(weights)
    state = by_hand.TrainState(weights, kept, biases)
    step = by_hand.train_step(loss_by_hand(table, case, layout), optimizer, state_places, layout)
    batch = jax.device_put(dict(rows_of(case, table.sizes["vocab"])), layout.sharding(layout.batch, ()))
    return Running(step.lower(state, batch).compile(), state, batch)


def loss_by_hand(table: ModelTable, case: Case, layout: Any):
    """The family's loss, given the numbers that do not follow from the shapes of its weights."""
    form = table.architecture
    frequencies = form.rope.inverse_frequencies(form.attention.rotary_dim)
    common = {"eps": form.norm_eps, "frequencies": frequencies, "dtype": jnp.dtype(case.dtype)}
    if table.name.startswith("llama3"):
        return partial(llama3.loss, numbers=llama3.Numbers(**common), layout=layout)
    routed = {"top_k": form.experts.top_k, "capacity_factor": form.experts.capacity_factor}
    if table.name.startswith("mixtral"):
        return partial(mixtral.loss, numbers=mixtral.Numbers(**common, **routed), layout=layout)
    numbers = deepseek3.Numbers(
        **common,
        **routed,
        amplitude=form.rope.amplitude,
        score_factor=form.rope.score_factor,
        nope_dim=form.attention.nope_dim,
        num_groups=form.experts.num_groups,
        chosen_groups=form.experts.chosen_groups,
        routed_scale=form.experts.scale,
    )
    return partial(deepseek3.loss, numbers=numbers, layout=layout)
