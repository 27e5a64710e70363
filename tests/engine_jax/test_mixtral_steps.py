"""Mixtral under every layout: trained as on one device, its arrays where the plan says."""

from __future__ import annotations

import pytest

from tests.engine_jax.places import assert_places_are_the_plans
from tests.engine_jax.steps import Case, assert_trains_as, compiled_step, plan_of, unoptimised_step
from tests.sameness.cases import MIXTRAL, case, covering
from tests.sameness.measure import assert_same_choices

TRAINED = covering(MIXTRAL)
PLACED = [
    Case(model=MIXTRAL, layout="ddp", mesh="data=8"),
    Case(model=MIXTRAL, layout="tp", mesh="data=2,tensor=4"),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)


def test_tokens_choose_as_on_one_device() -> None:
    assert_same_choices(case(MIXTRAL, "ep", "fsdp=2,expert=2"))


@pytest.mark.parametrize("case", TRAINED + PLACED, ids=str)
def test_arrays_are_where_the_plan_says(case: Case) -> None:
    step = unoptimised_step(case) if case in PLACED else compiled_step(case)
    assert_places_are_the_plans(step, plan_of(case))


def test_arrays_elsewhere_are_seen() -> None:
    ep, ep_as_cp = (Case(model=MIXTRAL, layout=layout, mesh="fsdp=2,expert=4") for layout in ("ep", "ep-as-cp"))
    with pytest.raises(AssertionError, match="length/expert"):
        assert_places_are_the_plans(unoptimised_step(ep), plan_of(ep_as_cp))
