"""Mixtral under every layout: trained as on one device, its arrays where the plan says, and nothing more on the links."""

from __future__ import annotations

import pytest

from tests.engine_jax.compiled_text import collectives
from tests.engine_jax.places import assert_places_are_the_plans
from tests.engine_jax.steps import LENGTH, Case, assert_trains_as, compiled_step, plan_of, unoptimised_step

MODEL = "mixtral-test"
LOSSES = 1e-4
TRAINED = [
    Case(model=MODEL, layout="fsdp", mesh="fsdp=8"),
    Case(model=MODEL, layout="hsdp", mesh="data=4,fsdp=2"),
    Case(model=MODEL, layout="fsdp-tp", mesh="fsdp=4,tensor=2"),
    Case(model=MODEL, layout="cp", mesh="fsdp=2,context=4"),
    Case(model=MODEL, layout="ep", mesh="fsdp=2,expert=4"),
    Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=4"),
    Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=4", rows=4),
]
PLACED = [
    Case(model=MODEL, layout="ddp", mesh="data=8"),
    Case(model=MODEL, layout="tp", mesh="data=2,tensor=4"),
]
EXPERT_LAYOUTS = [case for case in TRAINED if case.layout.startswith("ep")]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone, LOSSES)


@pytest.mark.parametrize("case", TRAINED + PLACED, ids=str)
def test_arrays_are_where_the_plan_says(case: Case) -> None:
    step = unoptimised_step(case) if case in PLACED else compiled_step(case)
    assert_places_are_the_plans(step, plan_of(case))


def test_arrays_elsewhere_are_seen() -> None:
    ep, ep_as_cp = (Case(model=MODEL, layout=layout, mesh="fsdp=2,expert=4") for layout in ("ep", "ep-as-cp"))
    with pytest.raises(AssertionError, match="length/expert"):
        assert_places_are_the_plans(compiled_step(ep), plan_of(ep_as_cp))


@pytest.mark.parametrize("case", EXPERT_LAYOUTS, ids=str)
def test_tokens_go_to_experts_and_experts_stay(case: Case) -> None:
    plan = plan_of(case)
    found = collectives(compiled_step(case).as_text(), plan.mesh)
    to_experts = [one for one in found if one.kind == "all-to-all"]
    # Forward, recomputed and backward, to experts and back; what is recomputed is not sent back.
    assert len(to_experts) >= 5
    assert {one.axes for one in to_experts} == {("expert",)}
    _, embed, width = plan.by_name["layers.moe.gate"].shape
    of_experts = [
        one
        for one in found
        if one.kind == "all-gather" and any({embed, width} <= set(result.shape) for result in one.results)
    ]
    assert of_experts
    assert {one.axes for one in of_experts} == {("fsdp",)}


def test_keys_and_values_move_without_the_heads_that_share_them() -> None:
    case = Case(model=MODEL, layout="cp", mesh="fsdp=2,context=4")
    found = collectives(compiled_step(case).as_text(), plan_of(case).mesh)
    whole_rows = [
        result.sizes
        for one in found
        if "context" in one.axes
        for result in one.results
        if result.dtype == "f32" and LENGTH in result.shape
    ]
    # Of 4 rows the 4 heads of keys and of values, 16 wide, where 8 heads of queries meet them.
    assert whole_rows
    assert all(sizes == [4, 4, 16, LENGTH] for sizes in whole_rows), whole_rows
