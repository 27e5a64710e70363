"""Weights in bfloat16 with master weights and gradients in float32, on JAX; on PyTorch: ``tests/engine_torch/test_master_weights.py``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np

from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import State, arrays_of, make_state
from shardwright.engine_jax.training.step import batch_sharding
from tests.engine_jax import steps
from tests.engine_jax.steps import batches_of, compile_plan, in_row_order, plan_of
from tests.sameness.cases import LLAMA3, case

CASE = case(LLAMA3, "zero2", "data=2")
WIDE: dict[str, Any] = {"dtype": "bfloat16"}
MASTER: dict[str, Any] = {
    **WIDE,
    "weights_dtype": "bfloat16",
    "master_dtype": "float32",
    "gradients_dtype": "float32",
    # Each has its own dtype: a step reads what was stored, and rounds what it stores.
    "moments_dtype": "bfloat16,float32",
}


def after_a_step(**changed: Any) -> Mapping[str, np.ndarray]:
    plan = make_plan(replace(plan_of(CASE).request, **changed))
    assert not plan.errors, plan.errors
    mesh, step = device_mesh(plan.mesh), compile_plan(plan)
    state: State = make_state(plan, mesh, partial(steps._initial_boxes, plan, CASE.seed), 0)
    sharding = batch_sharding(plan, mesh)
    (batch,) = batches_of(CASE, 1)
    placed = {name: jax.device_put(array, sharding) for name, array in in_row_order(batch, plan).items()}
    state, _ = step(state, placed)
    return {name: np.asarray(array) for name, array in arrays_of(state).items()}


def test_master_weights_are_those_of_a_run_in_float32() -> None:
    wide, narrow = after_a_step(**WIDE), after_a_step(**MASTER)
    trained = [name.removeprefix("master/") for name in narrow if name.startswith("master/")]
    assert len(trained) >= 12
    for name in trained:
        assert np.array_equal(narrow[f"master/{name}"], wide[name]), name
        assert narrow[name].dtype == ml_dtypes.bfloat16
        assert np.array_equal(narrow[name], wide[name].astype(ml_dtypes.bfloat16)), name
        first = wide[f"moments.first/{name}"].astype(ml_dtypes.bfloat16)
        assert np.array_equal(narrow[f"moments.first/{name}"], first), name
        assert np.array_equal(narrow[f"moments.second/{name}"], wide[f"moments.second/{name}"]), name
