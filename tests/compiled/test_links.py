"""What programs send over links: a program that is as planned takes the planned seconds, and each change of it those of the change."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest

from shardwright import Request, load_layout, model_table
from shardwright.compiled.links import sent_by_plan, sent_by_program
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.hardware.machine import read_machine
from shardwright.cost.price import price
from shardwright.cost.stages import with_unit_costs
from tests.compiled.programs import as_planned, changed, where, with_more

CHIPS = ("h100:2x4", "h100:1x8", "b200:4x2", "v5p:2x2x2", "v6e:2x4")
LAYOUTS = {
    "llama3-test": ("fsdp", "hsdp", "fsdp-tp", "cp", "ddp"),
    "mixtral-test": ("ep", "ep-as-cp", "tp-as-ep"),
    "deepseek3-test": ("ep", "fsdp"),
}


@cache
def planned(model: str, layout: str, chips: str, microbatches: int = 1) -> tuple[Plan, MeshMapping]:
    machine = read_machine(chips)
    request = Request(
        layout=load_layout(layout),
        table=model_table(model),
        batch=16 * microbatches,
        length=128,
        devices=8,
        microbatches=microbatches,
        chip=machine.chip,
    )
    plan = price(resolve(with_unit_costs(request, machine)), machine)
    return plan, map_mesh(plan.mesh, machine)


def drawn(number: int) -> list[tuple[str, str, str, int]]:
    draw = random.Random(3707)
    cases = [(model, layout, chips) for model, layouts in LAYOUTS.items() for layout in layouts for chips in CHIPS]
    return [(*case, draw.choice((1, 2))) for case in draw.sample(cases, number)]


@pytest.mark.parametrize(("model", "layout", "chips", "microbatches"), drawn(16))
def test_a_program_as_planned_takes_the_planned_seconds(model: str, layout: str, chips: str, microbatches: int) -> None:
    plan, mapping = planned(model, layout, chips, microbatches)
    program = as_planned(plan, chips)
    # The text has the groups of a hop by their size.
    program = replace(
        program,
        collectives=tuple(
            replace(
                compiled,
                kind=planned.compiled_as or planned.kind,
                group_size=None if planned.subgroup is None else planned.subgroup.size,
            )
            for compiled, planned in zip(program.collectives, plan.collectives, strict=True)
        ),
    )
    expected, sent = sent_by_plan(plan, mapping), sent_by_program(plan, program, mapping)
    assert expected.step_seconds is not None
    assert expected.moved_bytes > 0
    assert (sent.moved_bytes, sent.bytes_between) == (expected.moved_bytes, expected.bytes_between)
    assert sent.link_seconds == pytest.approx(expected.link_seconds)
    assert sent.step_seconds == pytest.approx(expected.step_seconds)


@pytest.mark.parametrize("sizes", [{"stage": 2, "fsdp": 4}, {"stage": 4, "fsdp": 2}])
def test_stages_as_planned_take_the_planned_step(sizes: dict[str, int]) -> None:
    machine = read_machine("h100:2x4")
    request = Request(
        layout=load_layout("pp"),
        table=model_table("llama3-test"),
        batch=32,
        length=128,
        mesh_sizes=sizes,
        microbatches=4,
        chip=machine.chip,
    )
    plan = price(resolve(with_unit_costs(request, machine)), machine)
    mapping = map_mesh(plan.mesh, machine)
    expected, sent = sent_by_plan(plan, mapping), sent_by_program(plan, as_planned(plan, "h100:2x4"), mapping)
    assert sent.link_seconds == pytest.approx(expected.link_seconds)
    assert sent.step_seconds == pytest.approx(expected.step_seconds)
    more = changed(as_planned(plan, "h100:2x4"), lambda one: replace(one, bytes_per_device=64 * one.bytes_per_device))
    slower = sent_by_program(plan, more, mapping)
    assert slower.step_seconds is not None
    assert expected.step_seconds is not None
    assert slower.step_seconds > expected.step_seconds


def test_an_all_reduce_in_place_of_a_scatter_takes_longer_and_is_waited_for_as_the_scatter_was() -> None:
    plan, mapping = planned("llama3-test", "fsdp", "h100:2x4")
    scatter = {"kind": "reduce-scatter", "component": "mlp"}
    program = changed(as_planned(plan), where(scatter, lambda one: replace(one, kind="all-reduce")))
    expected, sent = sent_by_plan(plan, mapping), sent_by_program(plan, program, mapping)
    assert sent.moved_bytes == expected.moved_bytes
    assert sent.link_seconds is not None
    assert expected.link_seconds is not None
    assert sent.link_seconds > expected.link_seconds


def test_buffers_of_exchanges_are_not_sent() -> None:
    plan, mapping = planned("mixtral-test", "ep", "h100:2x4")
    ragged = {"ragged": True}
    assert any(one.ragged for one in plan.collectives)
    program = changed(
        as_planned(plan), where(ragged, lambda one: replace(one, bytes_per_device=4 * one.bytes_per_device))
    )
    expected, sent = sent_by_plan(plan, mapping), sent_by_program(plan, program, mapping)
    assert sent.moved_bytes == expected.moved_bytes
    assert sent.link_seconds == pytest.approx(expected.link_seconds)


@pytest.mark.parametrize("chips", CHIPS)
def test_a_collective_without_a_name_is_waited_for(chips: str) -> None:
    plan, mapping = planned("llama3-test", "fsdp", chips)
    program = as_planned(plan, chips)
    largest = max(program.collectives, key=lambda one: one.bytes_per_device)
    unnamed = replace(largest, component=None, phase=None, tensors=(), bytes_per_device=1 << 24, count_per_step=1)
    before, after = (sent_by_program(plan, one, mapping) for one in (program, with_more(program, [unnamed])))
    assert after.moved_bytes == before.moved_bytes + (1 << 24)
    assert None not in (before.link_seconds, after.link_seconds, before.step_seconds, after.step_seconds)
    on_links = (after.link_seconds or 0.0) - (before.link_seconds or 0.0)
    assert (after.step_seconds or 0.0) - (before.step_seconds or 0.0) == pytest.approx(on_links)
