"""A tied embedding, under layouts in which its uses have different roles, compared with one device."""

from __future__ import annotations

import pytest

from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.engine_jax.made_rows import LENGTH, tokens_of
from tests.engine_jax.steps import Run, assert_same, compile_plan, run_plan

SIZES = "num_layers=1,embed=32,num_heads=4,num_kv_heads=4,head_dim=8,mlp=32,vocab=256,tied=true"
LAYOUTS = {
    # Where x is idle, its devices make the same gradient; at the logits each has its own rows.
    "one use repeated": "mesh: {fsdp: 2, x: 2}\nroles: {fsdp: fsdp, x: {elsewhere: idle, logits: fsdp}}",
    "the other repeated": "mesh: {fsdp: 2, x: 2}\nroles: {fsdp: fsdp, x: {elsewhere: fsdp, logits: idle}}",
    "one use sliced": "mesh: {fsdp: 2, x: 2}\nroles: {fsdp: fsdp, x: {elsewhere: tensor, embedding: idle}}",
}


def plan_of(layout: str) -> Plan:
    return make_plan(
        Request(
            layout=read_layout(parse_yaml(f"name: mine\n{layout}\n", "mine.yaml")),
            table=build("llama3-test", dict(one.split("=") for one in SIZES.split(","))),
            batch=8,
            length=LENGTH,
        )
    )


def two_steps(layout: str) -> Run:
    plan = plan_of(layout)
    assert not plan.errors, plan.errors
    return run_plan(plan, compile_plan(plan), [tokens_of(number, 8, 256) for number in range(2)], seed=0)


@pytest.fixture(scope="module")
def alone() -> Run:
    return two_steps("mesh: {x: 1}\nroles: {x: fsdp}")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_both_uses_are_summed_once(layout: str, alone: Run) -> None:
    assert_same(two_steps(layout), alone, 1e-5)
