"""Experts over nodes: the time of both hops by hand, what `auto` chooses, what the finding names, and what a program may hide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.plan.plan import Plan, StepCost
from shardwright.core.planning import make_plan, resolve, with_all_to_one
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.cost.choices.moe import moe_seconds
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.steps.routing import bytes_between_hops, filled_share, sent_times, shares_of_one
from shardwright.cost.steps.step import timed
from shardwright.models import build
from tests.sameness.own_layouts import own_layout

NODES, GPUS = 8, 8
SIZES = {"fsdp": 1, "node": NODES, "expert": GPUS}
TOKENS, WIDTH, TOP_K = 4096, 7168 * 2, 8
OUT, LATENCY = 50e9, 6.6e-6


def request_of(move: str = "two-hops", **options: object) -> Request:
    """671B on 8 nodes of 8, a row of 4,096 tokens on each device."""
    layout = replace(own_layout("ep-nodes"), move_moe=move)
    given = {"batch": NODES * GPUS, "length": TOKENS, "engine": "torch", "mesh_sizes": SIZES, "dtype": "bfloat16"}
    return Request(layout=layout, table=build("deepseek3-671b"), **{**given, **options})  # pyright: ignore[reportArgumentType]


def plan_of(move: str = "two-hops", **options: object) -> Plan:
    return resolve(request_of(move, **options))


def step_of(plan: Plan, chips: str = "h100:8x8") -> StepCost:
    machine = read_machine(chips)
    step = timed(plan, map_mesh(plan.mesh, machine)).step
    assert step is not None
    return step


def seconds(plan: Plan, axis: str) -> float:
    mapping = map_mesh(plan.mesh, read_machine("h100:8x8"))
    times = timed(plan, mapping).times
    over = [(one, time) for one, time in zip(plan.collectives, times, strict=True) if one.ragged and axis in one.axes]
    return sum(time.seconds * one.count_per_step for one, time in over if time is not None)


def test_each_token_crosses_the_slow_network_once_for_a_node() -> None:
    """3.63 of 8 nodes, 7 of 8 of them others, five times in each of 58 layers and twice a row of numbers of experts; and once more
    where PyTorch repeats the sums that shared experts follow."""
    plan, direct = plan_of(), plan_of("all-to-all")
    sent = TOKENS * 3.6289 * WIDTH * 7 / 8 / OUT
    assert seconds(plan, "node") == pytest.approx(58 * 6 * sent, rel=0.03)
    assert seconds(direct, "node") == pytest.approx(58 * 6 * TOKENS * TOP_K * WIDTH * 7 / 8 / OUT, rel=0.03)
    assert step_of(plan).seconds < 0.9 * step_of(direct).seconds


def test_without_a_limit_on_groups_a_token_has_more_nodes() -> None:
    table = replace(build("deepseek3-671b"), expert_groups=1, chosen_groups=1)
    request = plan_of().request
    wider = resolve(replace(request, table=table))
    assert seconds(wider, "node") == pytest.approx(seconds(plan_of(), "node") * 5.3155 / 3.6289, rel=0.01)


def test_auto_takes_the_hops_that_are_faster() -> None:
    plan = price(make_plan(request_of("auto")), read_machine("h100:8x8"))
    (choice,) = (one for one in plan.choices if one.what == "move.moe")
    assert choice.chosen == plan.request.layout.move_moe == "two-hops"
    assert list(choice.seconds) == ["all-to-all", "ring", "weights", "two-hops"]
    # On a chip with one network there is nothing to save.
    inside = plan_of("auto", mesh_sizes={"fsdp": 1, "node": 2, "expert": 4}, batch=8)
    options = moe_seconds(inside, map_mesh(inside.mesh, read_machine("h100:1x8")))
    assert options is not None
    assert options["all-to-all"] < options["two-hops"]


def test_an_axis_over_nodes_is_named_where_it_is_hot_alone() -> None:
    two, direct = (price(make_plan(request_of(move)), read_machine("h100:8x8")) for move in ("two-hops", "all-to-all"))
    assert [one.where for one in two.findings if one.code == "SW201"] == []
    (finding,) = (one for one in direct.findings if one.code == "SW201")
    assert (finding.where, finding.fix) == ("axis 'node' as expert", "move: {moe: two-hops}")
    assert finding.effect is not None
    assert finding.effect.is_faster_by(0.05)


def test_one_device_that_gets_all_gets_each_token_once_from_other_nodes() -> None:
    plan = with_all_to_one(plan_of())
    shares = shares_of_one(plan)
    # A device has four experts, which are half of a token's.
    assert shares == NODES * GPUS / 2
    times = {axis: sent_times(plan, one, shares) for one in plan.collectives if one.ragged for axis in one.axes}
    assert times == {"node": pytest.approx(NODES / 3.6289, rel=1e-3), "expert": shares}
    assert {sent_times(plan, one, 1.0) for one in plan.collectives} == {1.0}


def test_rows_that_are_sent_on_are_touched_once_and_no_others() -> None:
    """Buffers have room for the tokens of all nodes; time is of those that an even routing sends."""
    plan, direct = with_all_to_one(plan_of()), plan_of("all-to-all")
    for name in ("router.dispatched", "router.returned"):
        row, before = plan.by_name[name], direct.by_name[name]
        assert row.bytes_per_device == NODES * before.bytes_per_device
        assert row.bytes_per_device * filled_share(plan, row, 1.0) == before.bytes_per_device
    assert bytes_between_hops(direct) == 0
    assert bytes_between_hops(plan) == pytest.approx(4 * TOKENS * 3.6289 * WIDTH, rel=1e-3)


def test_tokens_are_exchanged_beside_another_microbatch_where_a_file_says_so(tmp_path: Path) -> None:
    """What all products of a phase take longer than is hidden: of both hops, and of nothing else."""
    file = tmp_path / "mine.toml"
    file.write_text('kind = "h100"\noverlap = ["expert"]\n', encoding="utf-8")
    plan = plan_of(batch=4 * NODES * GPUS)
    apart, beside = step_of(plan), step_of(plan, f"h100:8x8+{file}")
    exchanged = seconds(plan, "node") + seconds(plan, "expert")
    assert apart.communication_seconds == beside.communication_seconds
    assert 0 < apart.exposed_seconds - beside.exposed_seconds <= exchanged * 1.0001
    assert apart.seconds - beside.seconds == pytest.approx(apart.exposed_seconds - beside.exposed_seconds)
