"""Weights in bfloat16 with master weights and gradients in float32: the master weights of a step have the bits of a run whose weights are
float32, and the weights at rest are their rounding.

Both runs compute in bfloat16, so they multiply the same numbers in the first step: initial values, rounded once; and every norm's
scale is 1. A router multiplies float32 weights, which rounding changes: it is in no case here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from tests.engine_jax.steps import OPTIONS, Case, batches_of, in_row_order, plan_of
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.runs import assembled
from tests.engine_torch.training import kept_after
from tests.matrix import some
from tests.sameness.cases import LLAMA3, case

WIDE: dict[str, Any] = {"dtype": "bfloat16"}
MASTER: dict[str, Any] = {
    **WIDE,
    "weights_dtype": "bfloat16",
    "master_dtype": "float32",
    "gradients_dtype": "float32",
    # Each has its own dtype: a step reads what was stored, and rounds what it stores.
    "moments_dtype": "bfloat16,float32",
}


def planned(case: Case, **changed: Any) -> Plan:
    plan = make_plan(replace(plan_of(case).request, **changed))
    assert not plan.errors, plan.errors
    return plan


def after_a_step(ranks: Ranks, plan: Plan, case: Case) -> dict[str, np.ndarray]:
    """The state after the first step, by the names of a checkpoint."""
    batches = [dict(in_row_order(batch, plan)) for batch in batches_of(case)[:1]]
    runs = ranks.first(plan.mesh.num_devices).run(kept_after, plan, case.seed, OPTIONS, batches)
    return assembled([after for _, after in runs])


def rounded(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).to(torch.bfloat16).to(torch.float32).numpy()


CASES = [
    case(LLAMA3, "zero1", "data=2"),
    case(LLAMA3, "zero-tp", "data=2,replica=1,tensor=2"),
    case(LLAMA3, "ddp", "data=2"),
]


@pytest.mark.parametrize("case", some(CASES, {0}), ids=str)
def test_master_weights_are_those_of_a_run_in_float32(case: Case, four: Ranks) -> None:
    wide = after_a_step(four, planned(case, engine="torch", **WIDE), case)
    narrow = after_a_step(four, planned(case, engine="torch", **MASTER), case)
    trained = [name.removeprefix("master/") for name in narrow if name.startswith("master/")]
    assert len(trained) >= 12
    for name in trained:
        assert np.array_equal(narrow[f"master/{name}"], wide[name]), name
        assert np.array_equal(narrow[name], rounded(wide[name])), name
        assert np.array_equal(narrow[f"moments.first/{name}"], rounded(wide[f"moments.first/{name}"])), name
        assert np.array_equal(narrow[f"moments.second/{name}"], wide[f"moments.second/{name}"]), name


def test_the_plan_has_their_bytes() -> None:
    one = case(LLAMA3, "zero2", "data=4")
    wide, narrow = planned(one).memory, planned(one, **MASTER).memory
    assert narrow.weights_bytes * 2 == wide.weights_bytes
    assert narrow.gradients_bytes == wide.gradients_bytes
    # 4 of the master weights, 2 and 4 of both moments, where both have 4.
    assert narrow.optimizer_bytes * 8 == wide.optimizer_bytes * 10
    gathers = {row.bytes_per_device for row in planned(one, **MASTER).collectives if row.kind == "all-gather"}
    assert gathers == {row.bytes_per_device // 2 for row in planned(one).collectives if row.kind == "all-gather"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"master_dtype": "float32"}, "--master-dtype is float32, and --weights-dtype is float32"),
        ({"gradients_dtype": "bfloat16"}, "--gradients-dtype is bfloat16, and --weights-dtype is float32"),
        ({"master_dtype": "float16"}, "Nothing trains in float16"),
        ({"gradients_dtype": "int8"}, "must be one of float32, bfloat16"),
        ({"moments_dtype": "bfloat16,int8"}, "moments_dtype is 'int8', and must be one of float32, bfloat16"),
        (
            {"moments_dtype": "bfloat16,float32,float32"},
            "3 dtypes, and adamw keeps 2 of a weight, moments.first, moments.second. Give one dtype for all, or one for each.",
        ),
    ],
)
def test_dtypes_that_are_refused(changed: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        planned(case(LLAMA3, "zero1", "data=2"), **changed)


def test_pytorch_refuses_wide_gradients_of_what_it_gathers() -> None:
    request = plan_of(case(LLAMA3, "fsdp", "fsdp=4")).request
    (finding,) = make_plan(replace(request, engine="torch", **MASTER)).errors
    assert finding.code == "SW415"
    assert "fully_shard keeps the gradients" in finding.found
    assert finding.fix == "--weights-dtype float32 without --master-dtype"
