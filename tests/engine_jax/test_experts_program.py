"""A compiled step with experts: it has the collectives of the plan and the FLOPs of the model."""

from __future__ import annotations

from fractions import Fraction

import pytest

from shardwright.core.plan.plan import Plan
from shardwright.cost.flops import step_flops
from shardwright.engine_jax.lowering.links import links_of
from tests.engine_jax.program import Program, assert_program_is_the_plan
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
]


def blocks_of(plan: Plan) -> Fraction:
    """The blocks of rows that a device multiplies if experts have equal loads, without the padding of the last ones."""
    experts = links_of(plan).experts
    assert experts is not None
    return Fraction(experts.traffic.assignments, experts.products.rows)


@pytest.mark.parametrize("case", some(CASES, (1, 3, 4)), ids=str)
def test_a_step_has_the_collectives_of_the_plan(case: Case) -> None:
    assert_program_is_the_plan(compiled_step(case).as_text(), plan_of(case))


@pytest.mark.parametrize("case", some(CASES, (1, 3, 4)), ids=str)
def test_a_step_has_the_flops_of_the_model_and_no_axis_repeats_them(case: Case) -> None:
    plan = plan_of(case)
    assert Program(compiled_step(case).as_text()).flops(blocks_of(plan)) == sum(step_flops(plan).values())
