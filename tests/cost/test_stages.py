"""Units shared out on a machine: by seconds, and within the memory of its chips."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import planned, typed_request
from shardwright.core.plan.plan import Plan
from shardwright.core.stages.choice import choose
from shardwright.core.stages.units import UnitCost, units_of
from shardwright.cost import price, read_machine
from shardwright.cost.hardware.links import map_mesh
from shardwright.cost.stages import assign_by_time

MACHINE = read_machine("h100:8")


def plan_of(model: str = "deepseek3-test", stages: int = 4, given: str | None = None, **options) -> Plan:
    settings = options.pop("settings", {})
    request = sw.Request(
        layout=sw.load_layout("pp"),
        table=sw.model_table(model, settings),
        batch=32,
        length=1024,
        mesh_sizes={"stage": stages, "data": 1, "fsdp": 8 // stages},
        microbatches=8,
        engine=options.pop("engine", "torch"),
        dtype="bfloat16",
        chip=MACHINE.chip,
        stages=given,
        **options,
    )
    return sw.make_plan(request)


def largest(plan: Plan) -> float:
    """Seconds of the slowest stage."""
    assert plan.pipeline is not None
    return max(stage.work["forward"] + stage.work["backward"] for stage in plan.pipeline.stages)


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_the_slowest_stage_is_as_fast_as_it_can_be(engine):
    """Against every assignment of the units to two stages, each planned and priced as one that a user gives."""
    found = price(plan_of(stages=2, engine=engine), MACHINE)
    assert found.pipeline is not None
    assert found.pipeline.choice.by == "seconds"
    letters = "E" + "t" * found.request.table.num_layers + "L"
    given = {
        end: price(plan_of(stages=2, engine=engine, given=f"{letters[:end]}|{letters[end:]}"), MACHINE)
        for end in range(1, len(letters))
    }
    assert {plan.pipeline.choice.by for plan in given.values() if plan.pipeline} == {"given"}
    assert largest(found) == pytest.approx(min(map(largest, given.values())), rel=1e-9)
    assert max(map(largest, given.values())) > 1.5 * largest(found)


def test_units_are_shared_out_within_the_memory():
    """The fastest of all assignments of which each stage fits; without one, the fastest."""
    table = sw.model_table("deepseek3-test")
    units = units_of(table, 64, recomputed=True)
    costs = [
        UnitCost(
            seconds=1.0 + (unit.letter == "L") + 0.1 * number,
            stored_bytes=100 * (4 if unit.letter == "E" else 1),
            saved_bytes=10,
            working_bytes=30 if unit.letter == "L" else 5,
        )
        for number, unit in enumerate(units)
    ]

    def bytes_of(stage: int, own: list[UnitCost]) -> int:
        # 1f1b: as many live microbatches as stages from this one on.
        return sum(one.stored_bytes + (3 - stage) * one.saved_bytes for one in own) + max(o.working_bytes for o in own)

    chosen = {}
    for limit in (2000, 800, 600, 540, 300):
        found = choose(units, ranks=3, microbatches=6, engine="torch", costs=costs, limit_bytes=limit)
        runs = [
            [costs[a:b] for a, b in itertools.pairwise((0, *cuts, len(units)))]
            for cuts in itertools.combinations(range(1, len(units)), 2)
        ]
        fitting = [run for run in runs if all(bytes_of(n, own) <= limit for n, own in enumerate(run))]
        least = min(max(sum(one.seconds for one in own) for own in run) for run in fitting or runs)
        ends = list(itertools.accumulate((len(stage.letters) for stage in found.stages), initial=0))
        times = [sum(one.seconds for one in costs[a:b]) for a, b in itertools.pairwise(ends)]
        assert max(times) == pytest.approx(least), limit
        chosen[limit] = (found.text, found.by)
    assert {by for _, by in chosen.values()} == {"seconds", "seconds, within the memory"}
    assert chosen[300] == chosen[2000]


def test_a_smaller_memory_moves_layers():
    """The first stage of 1f1b has the most live microbatches: with less memory it has fewer layers."""
    options = {"settings": {"embed": "512", "num_layers": "12"}, "model": "llama3-test"}
    plan = plan_of(**options)
    mapping = map_mesh(plan.mesh, MACHINE)
    wide = assign_by_time(plan, mapping, sw.make_plan)
    assert wide.pipeline is not None
    most = max(wide.pipeline.total_bytes(rank) for rank in range(4))
    assert MACHINE.chip is not None
    small = replace(MACHINE.chip, usable_bytes=most - 1)
    narrow = assign_by_time(sw.make_plan(replace(plan.request, chip=small)), mapping, sw.make_plan)
    assert narrow.pipeline is not None
    assert narrow.pipeline.choice.by == "seconds, within the memory"
    assert narrow.pipeline.choice.text != wide.pipeline.choice.text
    assert max(narrow.pipeline.total_bytes(rank) for rank in range(4)) < most


def test_findings_say_the_bubble_by_seconds():
    plan = price(plan_of(), MACHINE)
    assert plan.pipeline is not None
    [pays] = [one for one in plan.findings if one.code == "SW121"]
    assert plan.pipeline.idle_text in pays.found
    assert plan.pipeline.idle_text.endswith("by their seconds")
    assert "by their flops" not in "".join(one.found + one.cost for one in plan.findings)


def test_a_fix_is_tried_with_what_units_cost_under_it(tmp_path):
    """Under `full` other stages are the fastest, and these need more memory than those that the costs under `none` would give."""
    small = tmp_path / "small.toml"
    small.write_text(
        'kind = "h100"\n[numbers]\nusable_bytes = { value = 212000000, source = "a test", date = "2026-11-20" }\n'
    )
    options = PlanOptions(
        set=(("embed=512", "num_layers=9", "vocab=16000", "mlp=2048"),),
        mesh="stage=2,data=1,fsdp=8",
        engine="torch",
        dtype="bfloat16",
        batch=256,
        microbatches=16,
        schedule="gpipe",
        length=256,
        chips=f"h100:2x8+{small}",
    )
    found, after = (
        planned(typed_request("llama3-test", "pp", replace(options, remat=one))) for one in ("none", "full")
    )
    fixes, left = ([one.fix for one in plan.findings if one.code == "SW312"] for plan in (found, after))
    assert len(fixes) == 1
    assert left, "the limit is between the two"
    assert fixes != ["--remat full"]
