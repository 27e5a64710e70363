"""What is planned and not yet trained is refused by name, with what to use in its place; all else is let through."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwright.core.errors import InputError
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.request import Request
from shardwright.engine_jax.support import require_support
from shardwright.layouts import load_layout, preset_names
from shardwright.models import build


def plan_of(model: str, layout: str, attention: str = "", moe: str = "", **sizes: int) -> Plan:
    how = load_layout(layout)
    how = replace(how, move_attention=attention or how.move_attention, move_moe=moe or how.move_moe)
    return make_plan(Request(layout=how, table=build(model), batch=16, length=64, mesh_sizes=sizes, devices=8))


REFUSED = {
    "stages": (
        plan_of("llama3-test", "pp", stage=2),
        "layout 'pp': pipeline stages ('stage', size 2) can be planned and not yet trained. "
        "Give the axis size 1, or another layout: fsdp, fsdp-tp.",
    ),
    "a ring of keys": (
        plan_of("llama3-test", "cp", attention="ring", context=4),
        "move.attention 'ring' can be planned and not yet trained. Use --move attention=gather.",
    ),
    "a ring of keys over the expert axis": (
        plan_of("deepseek3-test", "ep-as-cp", attention="ring", expert=4),
        "move.attention 'ring' can be planned and not yet trained. Use --move attention=gather.",
    ),
    "a ring of tokens": (
        plan_of("mixtral-test", "ep", moe="ring", expert=4),
        "move.moe 'ring' can be planned and not yet trained. Use --move moe=all-to-all.",
    ),
    "gathered experts": (
        plan_of("mixtral-test", "ep-as-cp", moe="weights", expert=4),
        "move.moe 'weights' can be planned and not yet trained. Use --move moe=all-to-all.",
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
