"""The plans of published steps, made as the command line makes them."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

from benchmarks.published.steps import FOLDER, Published
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import TypedRequest, typed_request
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.cost import Machine, price

WHOLE = ("batch", "length", "microbatches", "loss_chunks")
BROKEN = ("expert_buffer",)


def typed(step: Published) -> TypedRequest:
    """The request of a step's arguments. They name files relative to the repository."""
    arguments = step.arguments
    layout, found, given = None, PlanOptions(), dict[str, object]()
    words = iter(enumerate(arguments[1:], 1))
    for position, word in words:
        name = word.removeprefix("--").replace("-", "_")
        if name == "set":
            rest = arguments[position + 1 :]
            settings = rest[: next((n for n, each in enumerate(rest) if each.startswith("--")), len(rest))]
            given["set"] = (tuple(settings),)
            for _ in settings:
                next(words)
        elif name == "load_balance":
            given[name] = True
        else:
            _, value = next(words)
            if name == "layout":
                layout = value
            else:
                given[name] = int(value) if name in WHOLE else float(value) if name in BROKEN else value
    before = os.getcwd()
    os.chdir(FOLDER.parent.parent)
    try:
        return typed_request(arguments[0], layout, replace(found, **given))  # pyright: ignore[reportArgumentType]
    finally:
        os.chdir(before)


@cache
def plan_of(step: Published) -> Plan:
    """The plan without times."""
    return make_plan(typed(step).request)


@cache
def held_by(step: Published) -> Plan:
    """The plan whose memory is that of the source's program."""
    return plan_of(replace(step, plan=f"{step.plan} {step.memory}", memory="")) if step.memory else plan_of(step)


def machine_of(step: Published) -> Machine:
    """The machine of its --chips."""
    machine = typed(step).machine
    assert machine is not None
    return machine


def priced(step: Published) -> Plan:
    """The plan with times."""
    return price(plan_of(step), machine_of(step))


def published_seconds(step: Published) -> float:
    """Seconds of the step as published, or by its tokens per second."""
    if step.seconds is not None:
        return step.seconds
    assert step.tokens_per_s is not None
    request = plan_of(step).request
    return request.batch * request.length / machine_of(step).num_devices / step.tokens_per_s
