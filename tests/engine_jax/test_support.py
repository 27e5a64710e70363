"""What is planned and not yet trained is refused by name, with what to use in its place; all else is let through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.errors import InputError
from shardwright.core.layout_reading import read_layout
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.request import Request
from shardwright.engine_jax.support import require_support
from shardwright.files import parse_yaml
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build


def plan_of(model: str, layout: str, attention: str = "", moe: str = "", **sizes: int) -> Plan:
    how = load_layout(layout)
    how = replace(how, move_attention=attention or how.move_attention, move_moe=moe or how.move_moe)
    return make_plan(Request(layout=how, table=build(model), batch=16, length=64, mesh_sizes=sizes, devices=8))


def ruled(rule: str) -> Plan:
    text = f"name: mine\nmesh: {{a: 2, b: 2}}\nroles: {{a: tensor, b: tensor}}\nrules: {{{rule}}}\n"
    layout = read_layout(parse_yaml(text, "mine.yaml"))
    return make_plan(Request(layout=layout, table=build("llama3-test"), batch=16, length=64))


REFUSED = {
    "stages": (
        plan_of("llama3-test", "pp", stage=2),
        "layout 'pp': pipeline stages ('stage', size 2) can be planned and not yet trained. "
        "Give the axis size 1, or another layout: fsdp, fsdp-tp.",
    ),
    "a rule that keeps the minor axis": (
        ruled("attention: {heads: [b]}"),
        "layout 'mine': the rule for 'heads' in 'attention' keeps 'b' and leaves out 'a', which stands before it in the "
        "mesh. A device's heads, hidden units or vocabulary entries are then no part of what it holds. Leave out 'b' too, "
        "or it alone.",
    ),
}


@pytest.mark.parametrize(("plan", "said"), REFUSED.values(), ids=REFUSED)
def test_refused(plan: Plan, said: str) -> None:
    with pytest.raises(InputError) as error:
        require_support(plan)
    assert str(error.value) == said


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
@pytest.mark.parametrize("layout", [name for name in preset_names() if name != "pp"])
def test_every_preset_without_stages_is_let_through(model: str, layout: str) -> None:
    require_support(plan_of(model, layout))


def test_a_movement_that_nothing_needs_is_let_through() -> None:
    require_support(plan_of("llama3-test", "cp", attention="ring", context=1))
    require_support(plan_of("llama3-test", "ep", moe="ring", expert=4))
    require_support(plan_of("mixtral-test", "ep", moe="weights", expert=1))
    require_support(plan_of("llama3-test", "pp", stage=1))


@pytest.mark.parametrize("rule", ["attention: {heads: [a]}", "attention: {kv_heads: []}", "mlp: {mlp: [a, b]}"])
def test_a_rule_that_keeps_the_major_axes_is_let_through(rule: str) -> None:
    require_support(ruled(rule))


@pytest.mark.parametrize("how", [{"attention": "ring"}, {"attention": "ulysses"}, {"moe": "ring"}, {"moe": "weights"}])
def test_every_movement_is_let_through(how: dict[str, str]) -> None:
    require_support(plan_of("deepseek3-test", "ep-as-cp", **how, expert=4))
