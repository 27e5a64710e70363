"""Two steps of a random layout, compared with two steps on one device of the same engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from shardwright.core.plan.plan import Plan
from tests.engine_jax.made_rows import tokens_of
from tests.engine_jax.steps import Difference, Run, assert_same, compile_plan, difference, run_plan
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import trained_on
from tests.sameness.bounds import Bound, assert_within, bound_of, shares
from tests.sameness.random_layouts import ROWS, VOCAB, Drawn, Model

BATCHES = tuple(tokens_of(step, ROWS, VOCAB) for step in range(2))
"""The second step uses the weights that the first has updated; half of its rows are padding."""

LOSS = 1e-5
"""The relative difference from the loss on one device that is allowed, also with experts: no token of these models is near to a
tie."""

RunPlan = Callable[[Plan, int], Run]
"""``run(plan, seed)``: two steps from the initial values."""


class Apart(NamedTuple):
    """How much two runs differ; in bfloat16, ``share`` is the largest share of a bound, and ``of`` its quantity."""

    difference: Difference
    share: float = 0.0
    of: str = ""


class AgainstOneDevice:
    """Compares random layouts with one device of the same engine, on which each model and dtype is trained once."""

    def __init__(self, **engines: RunPlan) -> None:
        self._engines = engines
        self._alone: dict[tuple[Model, str, str], Run] = {}
        self._bounds: dict[Model, Bound] = {}

    def assert_same(self, drawn: Drawn) -> Apart:
        """Compare the losses of both steps and the gradients of every weight in both; return how much they differ."""
        run, model = self._engines[drawn.engine], drawn.model
        key = model, drawn.engine, drawn.dtype
        if key not in self._alone:
            self._alone[key] = run(drawn.alone, model.seed)
        ours, theirs = run(drawn.plan, model.seed), self._alone[key]
        if drawn.dtype == "float32":
            assert_same(ours, theirs, LOSS)
            return Apart(difference(ours, theirs))
        if model not in self._bounds:
            self._bounds[model] = bound_of(drawn.alone.request, BATCHES, model.seed)
        assert_within(self._bounds[model], ours, theirs)
        of, share = max(shares(self._bounds[model], ours, theirs).items(), key=lambda item: item[1])
        return Apart(difference(ours, theirs), share, of)


def on_jax(plan: Plan, seed: int) -> Run:
    """A run on simulated devices; the compiled programs are freed."""
    try:
        return run_plan(plan, compile_plan(plan), BATCHES, seed)
    finally:
        jax.clear_caches()


def on_ranks(ranks: Ranks) -> RunPlan:
    """Runs on as many of the ranks as a plan has devices."""
    return partial(_on_ranks, ranks)


def _on_ranks(ranks: Ranks, plan: Plan, seed: int) -> Run:
    return trained_on(ranks.first(plan.mesh.num_devices), plan, BATCHES, seed).run
