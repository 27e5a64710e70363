"""No fix is printed that the plan calls worse than what stands, unless it ends an error; each says the step before and after."""

from __future__ import annotations

import pytest

from shardwright import load_layout, make_plan
from shardwright.core.findings.effect import Effect, Price
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.cost.advice import effect_text
from shardwright.models import build
from shardwright.search import arrangements, presets_for
from tests.cost.drawn_fixes import compiled_outcomes, drawn_outcomes


def planned(model: str, layout: str, chips: str, sizes: dict[str, int], batch: int, **options) -> Plan:
    table, machine = build(model), read_machine(chips)
    request = Request(
        layout=load_layout(layout),
        table=table,
        mesh_sizes=sizes,
        devices=machine.num_devices,
        batch=batch,
        length=4096,
        dtype="bfloat16",
        chip=machine.chip,
        **options,
    )
    arranged = arrangements(table, machine, [load_layout(name) for name in presets_for(table)])
    return price(make_plan(request), machine, [one.candidate for one in arranged if one.layout.name != layout])


def test_experts_over_nodes_are_not_moved_into_one_where_that_is_slower():
    """Every size within a node was printed as the fix of this mesh, and takes longer. What is faster is two hops, and without
    them nothing is."""
    plan = planned("deepseek3-671b", "ep", "h100:32x8", {"fsdp": 8, "expert": 32}, 256)
    (found,) = [one for one in plan.findings if one.code == "SW201"]
    assert plan.step is not None
    assert found.fix.endswith("--mesh fsdp=8,expert=8,node=4 --move moe=two-hops")
    assert found.effect is not None
    assert found.effect.is_faster_by(0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwright.cost.topology.by_way_of_nodes", lambda *_: iter(()))
        again = planned("deepseek3-671b", "ep", "h100:32x8", {"fsdp": 8, "expert": 32}, 256)
    (left,) = [one for one in again.findings if one.code == "SW201"]
    assert (left.fix, left.effect) == ("", None)
    assert left.tried.startswith("none of the ")
    for expert in (8, 4):
        other = planned("deepseek3-671b", "ep", "h100:32x8", {"fsdp": 256 // expert, "expert": expert}, 256)
        assert other.step is not None
        assert other.step.seconds > plan.step.seconds


def test_too_much_memory_under_one_layout_names_another_that_fits():
    plan = planned("deepseek3-671b", "fsdp", "h100:32x8", {}, 256)
    (found,) = [one for one in plan.findings if one.code == "SW312"]
    assert found.severity == "error"
    assert found.fix.startswith("--layout ep --mesh ")
    assert found.effect is not None
    assert found.effect.before.bytes_per_device == plan.memory.total_bytes_per_device
    assert found.text().count(f"  step   {found.effect.text}") == 1


def test_a_step_that_waits_for_a_third_of_its_time_says_what_would_help():
    plan = planned("llama3-8b", "hsdp", "h100:2x8", {}, 16)
    assert plan.step is not None
    waiting = [one for one in plan.findings if one.code == "SW206"]
    assert bool(waiting) == (plan.step.exposed_seconds > plan.step.seconds / 3)


@pytest.mark.parametrize(
    ("before", "after", "for_time", "for_memory"),
    [
        ((2.0, 10), (1.0, 20), True, False),
        ((2.0, 10), (2.0, 9), True, True),
        ((2.0, 10), (2.1, 9), False, True),
        ((2.0, 10), (2.0, 10), True, False),
        ((2.0, 10), (None, 10), False, False),
        ((None, 10), (3.0, 10), True, False),
        ((None, 10), (None, 11), False, False),
    ],
)
def test_what_is_better(before, after, for_time, for_memory):
    prices = [Price(seconds=s, bytes_per_device=b, tokens=8, devices=2) for s, b in (before, after)]
    effect = Effect(before=prices[0], after=prices[1], text=effect_text(*prices))
    assert (effect.is_better(for_memory=False), effect.is_better(for_memory=True)) == (for_time, for_memory)


def test_steps_of_other_numbers_of_tokens_are_compared_by_the_token():
    before, after = (Price(seconds=s, bytes_per_device=1, tokens=t, devices=2) for s, t in ((2.0, 8), (3.0, 16)))
    effect = Effect(before=before, after=after, text=effect_text(before, after))
    assert effect.is_faster
    assert effect.text == "2.00 s to 3.00 s for 16 tokens in place of 8"


def test_no_printed_fix_of_drawn_requests_is_worse():
    """More of them: ``python -m tests.cost.drawn_fixes --count 300``."""
    found = drawn_outcomes(count=15, seed=7)
    assert {one.kind for one in found} >= {"ended", "faster"}
    for one in found:
        assert one.kind in ("ended", "faster", "smaller", "same"), (one.case, one.finding.text())
        assert one.finding.effect is not None, one.finding.text()


def test_no_printed_fix_about_a_compiled_program_is_worse():
    """More of them: ``python -m tests.cost.drawn_fixes --compiled --count 300``."""
    found = drawn_outcomes(7, 3, compiled_outcomes, ("mixtral-8x7b",))
    assert {one.finding.code for one in found} >= {"SW301", "SW311", "SW312"}
    for one in found:
        assert one.kind in ("ended", "faster", "smaller", "same"), (one.case, one.finding.text())
