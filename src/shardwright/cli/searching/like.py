"""`shardwright search --like`: which one change of a layout gains the most."""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice

from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import requested
from shardwright.cli.typed.verbs import SearchVerb
from shardwright.core.findings.errors import InputError
from shardwright.core.planning import make_plan
from shardwright.cost.advice import priced_request
from shardwright.cost.price import price
from shardwright.cost.stages import with_unit_costs
from shardwright.cost.steps.step import HOST_RATE
from shardwright.search.neighbours import faster_neighbours
from shardwright.search.space.policies import policies_of


def run_like(verb: SearchVerb) -> int:
    """Print the changes that make the step faster, the best first. Returns 1 if there is none."""
    typed = requested(verb.model, verb.like, verb.plan)
    machine = typed.machine
    if machine is None or machine.numbers is None:
        raise InputError(
            "search needs --chips of a kind whose speed is known, as h100:4x8: it orders changes by the time of a step."
        )
    plan = price(make_plan(typed.request, partial(with_unit_costs, machine=machine)), machine)
    before = priced_request(typed.request, machine)
    if before.seconds is None:
        raise InputError(
            f"layout '{plan.request.layout.name}' has no time on {machine.text}: `shardwright plan` says why."
        )
    tried = policies_of(plan.request.table, to_host=HOST_RATE in machine.numbers.numbers)
    policies = [policy.text for policy in tried]
    faster = list(islice(faster_neighbours(plan, machine, before, policies), verb.keep))
    value: dict[str, object] = {
        "model": plan.request.table.name,
        "machine": machine.text,
        "layout": plan.request.layout.name,
        "mesh": {axis: plan.mesh.size(axis) for axis in plan.mesh.names},
        "seconds": before.seconds,
        "bytes_per_device": before.bytes_per_device,
        "changes": [
            {"change": neighbour.change.text, "ratio": neighbour.ratio, "effect": neighbour.effect.to_json()}
            for neighbour in faster
        ],
    }
    if verb.plan.json:
        write_json(value)
    else:
        from shardwright.report.neighbours_view import neighbours_view

        write_view(neighbours_view(value), sys.stdout)
    return 0 if faster else 1
