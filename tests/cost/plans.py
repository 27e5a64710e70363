"""Plans for the tests of costs, priced or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwright import make_plan
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.request import Request
from shardwright.cost import price, read_machine
from shardwright.layouts import load_layout
from shardwright.models import build


def request(
    model: str, layout: str, *, move_moe: str | None = None, move_attention: str | None = None, **options: Any
) -> Request:
    table = build(model, {})
    declared = load_layout(layout)
    moves = {"move_moe": move_moe, "move_attention": move_attention}
    declared = replace(declared, **{name: how for name, how in moves.items() if how is not None})
    natural = {"batch": table.natural_batch, "length": table.natural_length, "dtype": table.dtype}
    return Request(layout=declared, table=table, **{**natural, **options})


def plan_of(model: str, layout: str, **options: Any) -> Plan:
    return make_plan(request(model, layout, **options))


def priced(model: str, layout: str, chips: str, **options: Any) -> Plan:
    machine = read_machine(chips)
    return price(plan_of(model, layout, devices=machine.num_devices, chip=machine.chip, **options), machine)
