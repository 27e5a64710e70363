"""Stages in other dtypes than float32: weights that stay gathered are summed in the dtype of the gradients, whatever dtype their use has."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import abstract_state
from shardwright.engine_jax.training.step import abstract_batch, train_step
from tests.engine_jax.steps import (
    OPTIONS,
    Case,
    Run,
    assert_same_gradients,
    batches_of,
    compile_plan,
    plan_of,
    run_plan,
)
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL

ROUNDED = 2e-2
"""The largest allowed difference of gradients that are rounded to bfloat16 a few times: each time by up to 1/256."""

NARROW = {"weights_dtype": "bfloat16"}
ROUTED = Case(model=MIXTRAL, layout="pp-kept", mesh="stage=2,fsdp=2", microbatches=2)
DENSE = Case(model=LLAMA3, layout="pp-kept", mesh="stage=2,fsdp=2", microbatches=2)


def in_dtypes(case: Case, dtypes: dict[str, Any]) -> Plan:
    plan = make_plan(replace(plan_of(case).request, **dtypes))
    assert not plan.errors, plan.errors
    return plan


def first_step(case: Case, dtypes: dict[str, Any]) -> Run:
    plan = in_dtypes(case, dtypes)
    return run_plan(plan, compile_plan(plan), batches_of(case, 1), case.seed)


def assert_first_steps_agree(case: Case, dtypes: dict[str, Any]) -> None:
    """With one device, in the same dtypes. In bfloat16 a token may choose another expert, so that only losses are alike."""
    ours, theirs = first_step(case, dtypes), first_step(case.alone, dtypes)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=ROUNDED / 2)
    if dtypes["dtype"] == "float32":
        assert_same_gradients(ours.gradients[0], theirs.gradients[0], ROUNDED)


def test_a_router_that_stays_gathered_is_summed_in_the_dtype_of_the_gradients() -> None:
    """It is used in float32, in a computation in bfloat16."""
    plan = in_dtypes(ROUTED, {"dtype": "bfloat16", **NARROW})
    mesh = device_mesh(plan.mesh)
    train_step(plan, mesh, OPTIONS).trace(abstract_state(plan, mesh), abstract_batch(plan, mesh))


@pytest.mark.matrix
def test_weights_narrower_than_the_computation_have_the_gradients_of_one_device() -> None:
    assert_first_steps_agree(DENSE, {"dtype": "float32", **NARROW})


def drawn(seed: int) -> tuple[Case, dict[str, Any]]:
    random = Random(seed)
    model = random.choice((LLAMA3, MIXTRAL, DEEPSEEK3))
    layouts = ("pp", "pp-kept") if model == LLAMA3 else ("pp", "pp-kept", "pp-ep", "pp-ep-kept")
    layout = random.choice(layouts)
    experts = "ep" in layout.split("-")
    case = Case(
        model=model,
        layout=layout,
        mesh="stage=2,fsdp=2" + (",expert=2" if experts else ""),
        microbatches=2 if experts else random.choice((2, 4)),
        stages="Ett|tL" if model == DEEPSEEK3 else random.choice(("", "E|t|t|L")),
        remat=random.choice(("none", "full", "dots")),
    )
    dtypes = {name: random.choice(("float32", "bfloat16")) for name in ("dtype", "weights_dtype", "moments_dtype")}
    return case, dtypes


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(12))
def test_drawn_dtypes_have_the_first_step_of_one_device(seed: int) -> None:
    assert_first_steps_agree(*drawn(seed))
