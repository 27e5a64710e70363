"""DeepSeek-V3 under every layout: trained as on one device, its arrays where the plan says, latents on the links."""

from __future__ import annotations

import pytest

from shardwright.core.plan import Plan
from tests.engine_jax.compiled_text import Collective, collectives
from tests.engine_jax.places import assert_places_are_the_plans
from tests.engine_jax.steps import LENGTH, Case, assert_trains_as, compiled_step, plan_of, unoptimised_step

MODEL = "deepseek3-test"
LOSSES = 1e-4
CP = Case(model=MODEL, layout="cp", mesh="fsdp=2,context=4")
EP_AS_CP = Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=4")
TRAINED = [
    Case(model=MODEL, layout="fsdp", mesh="fsdp=8"),
    Case(model=MODEL, layout="fsdp-tp", mesh="fsdp=4,tensor=2"),
    CP,
    Case(model=MODEL, layout="ep", mesh="fsdp=2,expert=4"),
    EP_AS_CP,
    Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=4", rows=4),
    Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=2", micro_steps=2),
]
PLACED = [
    Case(model=MODEL, layout="hsdp", mesh="data=2,fsdp=4"),
    Case(model=MODEL, layout="ddp", mesh="data=8"),
    Case(model=MODEL, layout="tp", mesh="data=2,tensor=4"),
]


@pytest.mark.parametrize("case", TRAINED, ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone, LOSSES)


def test_fsdp_2_with_cp_2_trains_as_fsdp_2_with_ep_as_cp_2() -> None:
    cp = Case(model=MODEL, layout="cp", mesh="fsdp=2,context=2")
    assert_trains_as(Case(model=MODEL, layout="ep-as-cp", mesh="fsdp=2,expert=2"), cp, LOSSES)


@pytest.mark.parametrize("case", TRAINED + PLACED, ids=str)
def test_arrays_are_where_the_plan_says(case: Case) -> None:
    step = unoptimised_step(case) if case in PLACED else compiled_step(case)
    assert_places_are_the_plans(step, plan_of(case))


def moved(case: Case) -> tuple[Plan, list[Collective]]:
    plan = plan_of(case)
    return plan, collectives(compiled_step(case).as_text(), plan.mesh)


@pytest.mark.parametrize("layout", ["ep", "ep-as-cp"])
def test_tokens_go_to_experts_and_experts_stay(layout: str) -> None:
    plan, found = moved(Case(model=MODEL, layout=layout, mesh="fsdp=2,expert=4"))
    to_experts = [one for one in found if one.kind == "all-to-all"]
    # Forward, recomputed and backward, to experts and back; what is recomputed is not sent back.
    assert len(to_experts) >= 5
    assert {one.axes for one in to_experts} == {("expert",)}
    experts, embed, width = plan.by_name["moe_layers.moe.gate"].shape
    held = sorted([experts // 4, embed, width])
    of_experts = [
        one for one in found if any(len(result.shape) == 3 and width in result.shape for result in one.results)
    ]
    assert any(held in [result.sizes for result in one.results] for one in of_experts if one.kind == "all-gather")
    assert {one.axes for one in of_experts} == {("fsdp",)}
    assert {one.kind for one in of_experts} == {"all-gather", "all-reduce"}


@pytest.mark.parametrize(("case", "axis"), [(CP, "context"), (EP_AS_CP, "expert")], ids=["cp", "ep-as-cp"])
def test_the_latent_is_all_of_a_row_that_moves(case: Case, axis: str) -> None:
    plan, found = moved(case)
    sizes = plan.request.table.sizes
    latent = sizes["latent"]
    over_tokens = [one for one in found if one.axes == (axis,) and one.kind != "all-to-all"]
    rows = case.rows // 2
    floats = {
        (one.kind, result.shape)
        for one in over_tokens
        for result in one.results
        if result.dtype == "f32" and result.shape[:2] == (rows, LENGTH)
    }
    # Forward the latent is gathered; backward its gradient is summed (the CPU has no reduce-scatter).
    assert floats == {("all-gather", (rows, LENGTH, latent)), ("all-reduce", (rows, LENGTH, latent))}
    keys, values = 128 + 64, 64
    decompressed = [
        sorted([count, length, sizes["heads"], width])
        for count in (rows, case.rows)
        for length in (LENGTH, LENGTH // 4)
        for width in (keys, values)
    ]
    assert not [one for one in found if any(result.sizes in decompressed for result in one.results)]
