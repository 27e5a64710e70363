"""Moving tokens or expert weights: what `move: {moe: auto}` chooses on a machine, by time.

An option stands for the collectives of one layer in all passes. A device sends (N-1)/N of an all-to-all's bytes and
(N-1)/N of a gather's result, so the bytes that it sends (core/plan/moe_move.py) give the bytes of each collective.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardwright.core.layout.auto import HOPS
from shardwright.core.plan.moe_move import collectives_per_layer, moe_wire_bytes
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, time_of

COLLECTIVES: Mapping[str, str] = {"all-to-all": "all-to-all", "ring": "all-gather", "weights": "all-gather"}
"""The collective of each option. A reduce-scatter takes as long as an all-gather."""


def choose_by_time(plan: Plan, mapping: MeshMapping, plan_again: Callable[[Request], Plan]) -> Plan:
    """The plan with the fastest option where the layout has `auto`, planned again if that changes the choice."""
    choice = next((one for one in plan.choices if one.what != HOPS), None)
    if choice is None:
        return plan
    seconds = moe_seconds(plan, mapping)
    if seconds is None:
        return plan
    chosen = min(seconds, key=lambda option: seconds[option])
    if chosen != choice.chosen:
        choice_findings = [finding for finding in plan.findings if finding.code == "SW105"]
        layout = replace(plan.request.layout, move_moe=chosen)
        plan = plan_again(replace(plan.request, layout=layout))
        plan = replace(plan, findings=(*plan.findings, *choice_findings))
    return replace(plan, choices=(replace(choice, chosen=chosen, seconds=seconds),))


def moe_seconds(plan: Plan, mapping: MeshMapping) -> dict[str, float] | None:
    """Seconds of one layer, all passes, for each option; None if a link has no figure."""
    chip = mapping.machine.numbers
    assert chip is not None
    rates = Rates.of(chip, "used")
    axes = plan.mesh.larger_than_one(plan.request.layout.axes_with("expert", "moe"))
    group = mapping.group(axes)
    found: dict[str, float] = {}
    for option, sent in moe_wire_bytes(plan.request, plan.mesh).items():
        kind, times = COLLECTIVES[option], collectives_per_layer(option, plan.request)
        time = time_of(kind, round(sent / times * group.size / (group.size - 1)), group, rates)
        if time is None:
            return None
        found[option] = times * time.seconds
    return found
