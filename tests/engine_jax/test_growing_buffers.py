"""Buffers of experts' tokens that nobody sized: a step that they are too small for leaves nothing, and is done again with larger ones.

The oracle is the same training with room for the worst case from the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from shardwright.core.model import capacity
from shardwright.core.model.capacity import ROOM_FOR_ALL
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.token_hops import may_overflow
from shardwright.data import Batch
from shardwright.engine_jax.training.run import JaxEngine
from shardwright.runs import StepMetrics
from shardwright.training.options import RunOptions
from tests.engine_jax.steps import Case, batches_of, plan_of
from tests.matrix import some
from tests.sameness.cases import DEEPSEEK3, MIXTRAL, case

CASES = [
    replace(case(MIXTRAL, "ep", "fsdp=1,expert=4"), microbatches=1),
    case(DEEPSEEK3, "ep", "fsdp=2,expert=4"),
    case(DEEPSEEK3, "ep-nodes", "fsdp=1,node=2,expert=2"),
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2", "moe=ring", balanced=True),
]


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that begin with three quarters of the even share."""
    monkeypatch.setattr(capacity, "ROWS_AT_FIRST", 1)
    monkeypatch.setattr(capacity, "TILE_ROWS", 1)
    monkeypatch.setattr(capacity, "SHARES_AT_FIRST", 0.75)


def engine_of(plan: Plan) -> JaxEngine:
    engine = JaxEngine(RunOptions(steps=2, out=Path("nowhere"), lr=1e-3), plan)
    engine.begin(None, 0)
    engine.prepare()
    return engine


def batches(case: Case, num: int) -> list[Batch]:
    return [Batch(first_row=0, next_row=0, arrays=dict(arrays)) for arrays in batches_of(case, num)]


def leaves_of(engine: JaxEngine) -> Mapping[str, np.ndarray]:
    found = jax.tree_util.tree_flatten_with_path(engine._state)[0]
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


def trained(plan: Plan, of: Case) -> tuple[list[StepMetrics], Mapping[str, np.ndarray]]:
    engine = engine_of(plan)
    metrics = [engine.step(batch, lambda: None) for batch in batches(of, 2)]
    return metrics, leaves_of(engine)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("case", some(CASES, ()), ids=str)
def test_a_step_that_overflows_is_done_again_and_nothing_of_it_stays(case: Case) -> None:
    plan = make_plan(replace(plan_of(case).request, expert_buffer=None))
    assert may_overflow(plan.request, plan.mesh)
    metrics, state = trained(plan, case)
    largest = make_plan(replace(plan.request, expert_buffer=ROOM_FOR_ALL))
    assert not may_overflow(largest.request, largest.mesh)
    expected_metrics, expected = trained(largest, case)
    assert metrics[0].grown_rows is not None
    assert [one.overflow for one in metrics] == [0, 0]
    assert [one.grown_rows for one in expected_metrics] == [None, None]
    for one, other in zip(metrics, expected_metrics, strict=True):
        assert (one.tokens, one.dropped) == (other.tokens, other.dropped)
        assert one.loss == pytest.approx(other.loss, rel=1e-5)
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        difference = np.linalg.norm((state[name] - array).astype(np.float64))
        assert difference <= 1e-3 * np.linalg.norm(array.astype(np.float64)) + 1e-12, name


@pytest.mark.usefixtures("small_buffers")
def test_a_buffer_of_a_given_size_does_not_grow_and_the_state_stays() -> None:
    plan = make_plan(replace(plan_of(CASES[0]).request, expert_buffer=0.125))
    engine = engine_of(plan)
    before = leaves_of(engine)
    metrics = engine.step(batches(CASES[0], 1)[0], lambda: None)
    assert metrics.overflow > 0
    assert metrics.grown_rows is None
    after = leaves_of(engine)
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)
