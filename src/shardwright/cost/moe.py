"""Tokens or weights by time: what `move: {moe: auto}` takes on a machine.

Each option is the collectives of one layer in all passes; a device sends (N-1)/N of an all-to-all's bytes and
(N-1)/N of a gather's result, so the bytes it sends (core/plan/moe_move.py) give the bytes of each collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwright.core.plan.moe_move import collectives_per_layer, moe_wire_bytes
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.cost.collectives import Rates, time_of
from shardwright.cost.links import Laid

COLLECTIVES: Mapping[str, str] = {"all-to-all": "all-to-all", "ring": "all-gather", "weights": "all-gather"}
"""What an option does: a reduce-scatter costs what an all-gather does."""


def choose_by_time(plan: Plan, laid: Laid) -> Plan:
    """The plan with the fastest way of moving tokens or weights where `auto` left it open, planned again if need be."""
    if not plan.choices:
        return plan
    (choice,) = plan.choices
    seconds = moe_seconds(plan, laid)
    if seconds is None:
        return plan
    chosen = min(seconds, key=lambda option: seconds[option])
    if chosen != choice.chosen:
        said = [finding for finding in plan.findings if finding.code == "SW105"]
        layout = replace(plan.request.layout, move_moe=chosen)
        plan = make_plan(replace(plan.request, layout=layout))
        plan = replace(plan, findings=(*plan.findings, *said))
    return replace(plan, choices=(replace(choice, chosen=chosen, seconds=seconds),))


def moe_seconds(plan: Plan, laid: Laid) -> dict[str, float] | None:
    """Seconds of one layer, all passes, for each option; None where a link has no figure."""
    chip = laid.machine.numbers
    assert chip is not None
    rates = Rates.of(chip, "used")
    axes = plan.mesh.larger_than_one(plan.request.layout.axes_with("expert", "moe"))
    group = laid.group(axes)
    found: dict[str, float] = {}
    for option, sent in moe_wire_bytes(plan.request, plan.mesh).items():
        kind, times = COLLECTIVES[option], collectives_per_layer(option, plan.request)
        time = time_of(kind, round(sent / times * group.size / (group.size - 1)), group, rates)
        if time is None:
            return None
        found[option] = times * time.seconds
    return found
