"""A compiled step with experts, in one microbatch: it has the collectives of the plan and the FLOPs of the model."""

from __future__ import annotations

import pytest

from tests.engine_jax.program import assert_steps_are_planned
from tests.engine_jax.steps import Case, compiled_step, plan_of
from tests.matrix import some

MODEL = "mixtral-test"
CASES = [
    Case(model=MODEL, layout="fsdp-tp", mesh="fsdp=4,tensor=2"),
    Case(model=MODEL, layout="ep", mesh="fsdp=2,expert=4"),
    Case(model=MODEL, layout="ep", mesh="fsdp=2,expert=4", move="moe=ring"),
    Case(model=MODEL, layout="ep", mesh="fsdp=2,expert=4", move="moe=weights"),
    Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=4", settings="capacity_factor=1.0"),
    Case(model=MODEL, layout="cp-as-ep", mesh="fsdp=2,context=2,expert=2"),
    Case(model=MODEL, layout="tp-as-ep", mesh="fsdp=4,tensor=2"),
    # Routed and shared experts have one input, which is gathered once.
    Case(model="deepseek3-test", layout="fsdp-tp", mesh="fsdp=2,tensor=2", settings="num_layers=4,num_dense_layers=2"),
]


# The steps of `ep`, `ep-as-cp` and `cp-as-ep` that `test_mixtral_steps.py` compiles are checked there.
@pytest.mark.parametrize("case", some(CASES, (3,)), ids=str)
def test_a_step_has_the_collectives_and_the_flops_of_the_plan(case: Case) -> None:
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))
