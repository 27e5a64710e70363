"""Moving tokens or expert weights: what `move: {moe: auto}` chooses on a machine, by time.

An option stands for the collectives of one layer in all passes (core/plan/moe_move.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.core.layout.auto import HOPS
from shardwright.core.plan.moe_move import option_collectives
from shardwright.core.plan.plan import Plan
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.cost.steps.routing import PASSES_OF_A_HOP


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
    found: dict[str, float] = {}
    for option, hops in option_collectives(plan.request, plan.mesh).items():
        found[option] = 0.0
        for hop in hops:
            # A reduce-scatter takes as long as an all-gather.
            sent = hop.num_bytes * (hop.times - hop.saved) / hop.times
            time = time_of(hop.kind, round(sent), mapping.group(hop.axes), rates)
            if time is None:
                return None
            found[option] += hop.times * time.seconds
        # Tokens of another hop are moved in memory too, twice in the backward pass.
        found[option] += sum(
            PASSES_OF_A_HOP * hop.num_bytes * (hop.times - 1) / rates.memory_bytes_per_s for hop in hops[:-1]
        )
    return found
