"""Starts of experts' kernels by a host, tokens that are sent once to each device, products whose scales are of blocks."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.token_hops import nodes_of_a_token
from shardwright.cost.hardware.chips import ChipNumbers, chip_of
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.hardware.machine import read_machine
from shardwright.cost.steps.launches import LAUNCH_S, launch_seconds
from shardwright.cost.steps.precision import computing_seconds
from shardwright.cost.steps.routing import once_share
from shardwright.cost.steps.step import all_seconds, times_of
from shardwright.models import build
from tests.cost.plans import plan_of

FUSED = replace(chip_of("b200"), program="fused")
MIXTRAL = {"mesh_sizes": {"expert": 8}, "devices": 8, "length": 1024, "remat": "none"}


def mixtral(batch: int, precision: str | None = None) -> Plan:
    recipe = None if precision is None else preset(precision)
    return plan_of("mixtral-8x7b", "ep", batch=batch, precision=recipe, chip=FUSED.chip, **MIXTRAL)


def in_experts(plan: Plan, chip: ChipNumbers) -> float:
    seconds = computing_seconds(plan, chip, "used")
    assert seconds is not None
    return seconds["moe", "forward"]


def test_a_layer_of_experts_takes_no_less_than_the_starts_of_its_kernels() -> None:
    """One expert on a device: two products forward, four backward; three times as many kernels where their operands are quantized."""
    layers = build("mixtral-8x7b").num_layers
    for precision, forward in ((None, 2), ("mxfp8", 6)):
        started = dict(launch_seconds(mixtral(8, precision), FUSED))
        assert started["moe", "forward"] == pytest.approx(LAUNCH_S * layers * forward)
        assert started["moe", "backward"] == pytest.approx(2 * LAUNCH_S * layers * forward)
        assert started["router", "forward"] == pytest.approx(LAUNCH_S * layers * 40)


def test_microbatches_start_kernels_anew_and_graphs_end_it() -> None:
    few, many = (
        plan_of(
            "deepseek3-671b", "ep", batch=64, microbatches=number, precision=preset("mxfp8"), chip=FUSED.chip, **MIXTRAL
        )
        for number in (1, 8)
    )
    as_graph = replace(FUSED, graphs=("step",))
    assert not list(launch_seconds(many, as_graph))
    assert ("attention", "forward") not in dict(launch_seconds(many, replace(FUSED, graphs=("attention",))))
    assert in_experts(many, FUSED) > 1.2 * in_experts(few, FUSED)
    assert in_experts(many, FUSED) > 1.2 * in_experts(many, as_graph)
    # A program that a compiler makes, and one of dense layers, start no experts' kernels.
    assert in_experts(many, replace(FUSED, program="compiled")) == in_experts(
        many, replace(as_graph, program="compiled")
    )
    assert not list(launch_seconds(plan_of("llama3-8b", "fsdp", devices=8, batch=8), FUSED))


def test_a_token_is_sent_once_to_each_device_that_has_an_expert_of_it() -> None:
    """Mixtral has two experts a token, one on each of 8 devices, and on four devices pairs of them: by all choices of two."""
    by_hand = sum(len({expert // 2 for expert in chosen}) for chosen in combinations(range(8), 2)) / 28 / 2
    for devices, share in ((8, 1.0), (4, by_hand)):
        plan = plan_of(
            "mixtral-8x7b", "ep", batch=8, **{**MIXTRAL, "devices": devices, "mesh_sizes": {"expert": devices}}
        )
        machine = read_machine(f"h100:{devices}")
        assert machine.numbers is not None
        times = times_of(plan, map_mesh(plan.mesh, machine))
        each, once = (all_seconds(plan, times, replace(machine.numbers, tokens_once=told)) for told in (False, True))
        for collective, apart, together in zip(plan.collectives, each, once, strict=True):
            assert apart is not None
            assert together == pytest.approx(apart * (share if collective.ragged else 1.0))


@pytest.mark.parametrize("seed", range(5))
def test_devices_of_a_token_are_those_of_drawn_routings(seed: int) -> None:
    """Of 671B four of eight groups are drawn, and eight experts in them."""
    draw, devices = Random(seed), 2 ** (2 + seed)
    table = build("deepseek3-671b")
    hit = 0
    for _ in range(3000):
        groups = draw.sample(range(8), 4)
        experts = draw.sample([32 * group + place for group in groups for place in range(32)], 8)
        hit += len({expert * devices // 256 for expert in experts})
    assert nodes_of_a_token(table, devices) == pytest.approx(hit / 3000, rel=0.02)
    plan = plan_of("deepseek3-671b", "ep", batch=64, **{**MIXTRAL, "devices": 64, "mesh_sizes": {"expert": 8}})
    (exchange, *_) = (one for one in plan.collectives if one.ragged)
    assert once_share(plan, exchange) == pytest.approx(nodes_of_a_token(table, 8) / 8)


def test_fewer_microbatches_or_more_rows_never_make_starts_longer() -> None:
    draw = Random(7)
    for _ in range(10):
        rows, number = 8 * 2 ** draw.randrange(3), 2 ** draw.randrange(3)
        fewer, more = (
            in_experts(
                plan_of("mixtral-8x7b", "ep", batch=rows * 4, microbatches=count, chip=FUSED.chip, **MIXTRAL), FUSED
            )
            for count in (number, 2 * number)
        )
        assert fewer <= more * (1 + 1e-9)
