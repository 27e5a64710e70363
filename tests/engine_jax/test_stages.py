"""Stages on JAX: trained as on one device; the program has the collectives and the FLOPs of the plan."""

from __future__ import annotations

import pytest

from tests.engine_jax.program import assert_steps_are_planned
from tests.engine_jax.steps import Case, assert_trains_as, compiled_step, plan_of
from tests.matrix import some
from tests.sameness.stage_cases import STAGED

DEFAULT = (0, 1, 5)
"""Those of `make test`. In the last one a rank has two different neighbours."""


@pytest.mark.parametrize("case", some(STAGED, DEFAULT), ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


@pytest.mark.parametrize("case", some(STAGED, DEFAULT), ids=str)
def test_a_step_has_the_collectives_and_the_flops_of_the_plan(case: Case) -> None:
    assert_steps_are_planned(compiled_step(case).as_text(), plan_of(case))
