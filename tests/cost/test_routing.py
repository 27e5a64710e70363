"""Rows of experts in the time of a step: an even routing, one device that gets all, and what hides the gathers of experts' matrices."""

from __future__ import annotations

import io
from dataclasses import replace
from random import Random

import pytest

from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.model.capacity import ROOM_FOR_ALL
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan, with_all_to_one
from shardwright.cost import price, read_machine
from shardwright.cost.hardware.chips import chip_of
from shardwright.cost.steps.elementwise import EAGER_PASSES, elementwise_bytes
from shardwright.cost.steps.flops import step_flops
from shardwright.cost.steps.routing import shares_of_one
from shardwright.models import build
from shardwright.report.plan.plan_view import SECTIONS, plan_view
from shardwright.report.text.terminal import to_text
from shardwright.report.text.units import pretty_seconds
from tests.cost.plans import priced, request

SHARE = chip_of("h100").kernels_share()
MIXTRAL = {"mesh_sizes": {"expert": 8}, "batch": 64, "length": 4096}


def step_of(plan: Plan) -> StepCost:
    assert plan.step is not None
    return plan.step


def test_time_is_of_an_even_routing_and_memory_of_what_buffers_hold() -> None:
    largest, usual, even = (
        priced("mixtral-8x7b", "ep", "h100:1x8", engine="torch", expert_buffer=buffer, **MIXTRAL)
        for buffer in (ROOM_FOR_ALL, None, 1.0)
    )
    for plan in (largest, usual):
        assert step_of(plan).seconds == step_of(even).seconds
        assert elementwise_bytes(plan) == elementwise_bytes(even)
    # Buffers have 1.25 even shares, and may grow to 4: memory between the peaks of a layer is linear in them.
    activations = [plan.memory.activations_bytes for plan in (largest, usual, even)]
    assert activations[1] - activations[2] == pytest.approx((activations[0] - activations[2]) * 0.25 / 3, rel=1e-3)
    assert usual.answer is not None
    assert largest.answer is not None
    assert usual.answer.needed_bytes == usual.memory.total_bytes_per_device
    assert usual.answer.needed_bytes_if_one_device_gets_all == largest.memory.total_bytes_per_device
    assert largest.answer.needed_bytes_if_one_device_gets_all is None
    (found,) = (one.found for one in largest.findings if one.code == "SW405")
    assert found.startswith("a device has capacity for all 262,144 assignments that its experts may receive, 4 times")
    assert step_of(usual).seconds_if_one_device_gets_all == step_of(largest).seconds_if_one_device_gets_all
    assert step_of(even).seconds_if_one_device_gets_all is None
    assert "seconds_if_one_device_gets_all" not in step_of(even).to_json()


def test_one_device_that_gets_all_multiplies_and_receives_all() -> None:
    """Mixtral on 8 devices: two experts a token, one on each device, so four times the even share, by hand."""
    plan = priced("mixtral-8x7b", "ep", "h100:1x8", remat="none", engine="torch", **MIXTRAL)
    step = step_of(plan)
    assert shares_of_one(plan) == 1.25
    assert shares_of_one(with_all_to_one(plan)) == 4.0
    experts = {where: flops for where, flops in step_flops(plan).items() if where[0] == "moe"}
    exchanged = sum(one.seconds or 0.0 for one in plan.collectives if one.ragged)
    between = sum(elementwise_bytes(with_all_to_one(plan), 4.0).values()) - sum(elementwise_bytes(plan).values())
    # Three times as much again as in an even routing: no product of an expert is small enough to reach less of its rate.
    more = 3 * sum(experts.values()) / 794.5e12 / SHARE + 3 * exchanged + EAGER_PASSES * between / 2.85e12 / SHARE
    assert step.seconds_if_one_device_gets_all == pytest.approx(step.seconds + more, rel=0.02)
    assert step.to_json()["seconds_if_one_device_gets_all"] == step.seconds_if_one_device_gets_all
    smaller = step_of(
        priced("mixtral-8x7b", "ep", "h100:1x8", remat="none", engine="torch", expert_buffer=2.0, **MIXTRAL)
    )
    assert smaller.seconds == step.seconds
    assert step.seconds < (smaller.seconds_if_one_device_gets_all or 0.0) < (step.seconds_if_one_device_gets_all or 0.0)


def test_jax_touches_rows_of_its_static_buffers_that_nobody_sent() -> None:
    """Gate, up and the output are filled before the loop over blocks, by hand: of three even shares that stay empty."""
    largest, even = (
        step_of(priced("mixtral-8x7b", "ep", "h100:1x8", remat="none", expert_buffer=buffer, **MIXTRAL))
        for buffer in (ROOM_FOR_ALL, 1.0)
    )
    empty_rows, row_bytes = 3 * 2 * 8 * 4096, 2 * (2 * 14336 + 4096)
    assert largest.seconds - even.seconds == pytest.approx(32 * empty_rows * row_bytes / 2.85e12 / SHARE, rel=1e-6)


def test_drawn_requests_have_one_even_time_whatever_their_buffers_hold() -> None:
    random = Random(20261128)
    for _ in range(4):
        engine, move = random.choice(["jax", "torch"]), random.choice(["all-to-all", "ring", "weights"])
        model, layout = random.choice([("mixtral-8x7b", "ep"), ("deepseek3-16b", "ep"), ("deepseek3-16b", "ep-as-cp")])
        chips = random.choice(["h100:2x8", "v5p:2x2x4", "b200:2x8"])
        options = {
            "mesh_sizes": {"expert": random.choice([4, 8])},
            "batch": 16 * random.choice([1, 2, 4]),
            "length": random.choice([1024, 4096]),
            "remat": random.choice(["full", "none"]),
            "engine": engine,
            "move_moe": move,
        }
        even = step_of(priced(model, layout, chips, expert_buffer=1.0, **options))
        for buffer in (None, 1.0 + random.random()):
            step = step_of(priced(model, layout, chips, expert_buffer=buffer, **options))
            if engine == "torch":
                assert step.seconds == pytest.approx(even.seconds), (model, layout, chips, options, buffer)
            assert step.seconds >= 0.999 * even.seconds
            if step.seconds_if_one_device_gets_all is not None:
                assert step.seconds_if_one_device_gets_all > 0.999 * step.seconds


def test_the_view_says_both() -> None:
    plan = priced("mixtral-8x7b", "ep", "h100:1x8", engine="torch", **MIXTRAL)
    step = step_of(plan)
    even, longest = pretty_seconds(step.seconds), pretty_seconds(step.seconds_if_one_device_gets_all or 0.0)
    text = to_text(plan_view(plan, {}, shows=SECTIONS), io.StringIO(), width=200)
    assert f"even routing {even}, if one device gets all {longest}; with even routing computing" in text
    plan = priced("mixtral-8x7b", "ep", "h100:1x8", expert_buffer=1.0, **MIXTRAL)
    assert "even routing" not in to_text(plan_view(plan, {}, shows=SECTIONS), io.StringIO(), width=200)


@pytest.mark.parametrize(("chips", "margin"), [("mi355x:1x8", 1.07), ("h100:1x8", 1.0), ("b200:1x8", 1.0)])
def test_tokens_are_cheaper_than_gathered_weights_where_that_was_measured(chips: str, margin: float) -> None:
    """Mixtral-8x7B, EP 8, 11 rows on each of 8 MI355X, capacity 1.0: an all-to-all was 1.47 times as fast (MaxText #4179). The plan has
    1.08 of it, from what was measured of collectives beside products on AMD and of RCCL's rate."""
    machine = read_machine(chips)
    table = build("mixtral-8x7b", {"capacity_factor": "1.0"})
    options = {"mesh_sizes": {"expert": 8}, "batch": 88, "length": 4096, "devices": 8, "chip": machine.chip}
    seconds, exposed = {}, {}
    for move in ("all-to-all", "weights"):
        step = step_of(
            price(
                make_plan(replace(request("mixtral-8x7b", "ep", move_moe=move, **options), table=table)),
                machine,
            )
        )
        seconds[move], exposed[move] = step.seconds, step.exposed_seconds
    assert margin * seconds["all-to-all"] < seconds["weights"]
    # Of the program that XLA compiles for an H100: one gather of three when a layer is computed again, and two reductions of three. All
    # else is hidden, for which AMD's products pay.
    plan = priced("mixtral-8x7b", "ep", chips, move_moe="weights", mesh_sizes={"expert": 8}, batch=88, length=4096)
    of_experts = {one.phase: one.seconds or 0.0 for one in plan.collectives if one.component == "moe"}
    open_seconds = of_experts["recompute"] / 3 + of_experts["backward"] * 2 / 3
    numbers = chip_of(chips.partition(":")[0]).numbers
    lost = numbers["hidden_cost_share"].used.value if "hidden_cost_share" in numbers else 0.0
    hidden = sum(one.seconds or 0.0 for one in plan.collectives) - open_seconds
    assert exposed["weights"] == pytest.approx(open_seconds + lost * hidden, rel=0.05)
