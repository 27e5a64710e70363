"""SW201 of a pipeline: stages on links that are too slow for their transfers, or too fast while other axes have the slow ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.core.checks.edits import mesh_order, resized
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, every, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates
from shardwright.cost.steps.pipeline import timed_pipeline
from shardwright.cost.wording import seconds_text

Seconds = Callable[[list[str]], float]
"""Seconds a step of the collectives over any of some axes."""


def stages_on_links(plan: Plan, mapping: MeshMapping, seconds: Seconds) -> Iterator[Draft]:
    """One draft at most: a transfer that is longer than a pass, or stages within a domain that other axes leave."""
    chip = mapping.machine.numbers
    assert chip is not None
    timed = None if plan.pipeline is None else timed_pipeline(plan, mapping, chip, "used")
    if timed is None or timed.pipeline.send_seconds is None:
        return
    pipeline, axis = timed.pipeline, timed.pipeline.axes[0]
    send = timed.pipeline.send_seconds
    domain = "slice" if Rates.of(chip, "used").is_torus else "node"
    shortest = min((stage for stage in pipeline.stages if len(stage.stage.layers)), key=lambda one: one.work["forward"])
    if send > shortest.work["forward"]:
        smaller = reversed(divisors(plan.mesh.size(axis))[:-1])
        last = [*(name for name in plan.mesh.names if name != axis), axis]
        yield Draft(
            finding=Finding(
                code="SW201",
                severity="warning",
                where=f"axis '{axis}' as stage",
                position=plan.request.layout.mesh[axis].position,
                found=f"a transfer between stages takes {seconds_text(send)}, and the forward pass of stage "
                f"{shortest.number} {seconds_text(shortest.work['forward'])}: no pass hides it",
                needed="transfers that are shorter than passes: faster links, or fewer and larger stages",
                cost=f"{seconds_text(seconds([axis]))} of {seconds_text(seconds([*plan.mesh.names]))} of communication a step",
            ),
            candidates=(
                *([mesh_order(plan, last)] if last != list(plan.mesh.names) else []),
                *(c for size in smaller for c in resized(plan, axis, size)),
            ),
        )
        return
    outside = [name for name in plan.mesh.names if mapping.domains[name] > 1]
    if mapping.domains[axis] > 1 or not outside or plan.mesh.names[0] == axis:
        return
    own, others = seconds([axis]), seconds(outside)
    if others > 2 * own:
        yield Draft(
            finding=Finding(
                code="SW201",
                severity="warning",
                where=f"axis '{axis}' as stage",
                position=plan.request.layout.mesh[axis].position,
                found=f"{product(plan.mesh, [axis])} is within one {domain}, where links are fast, and {every(map(repr, outside))} "
                f"leaves it: {count(max(mapping.domains[name] for name in outside), domain)}",
                needed=f"stages across {domain}s: they send the least",
                cost=f"{seconds_text(others)} of communication a step outside, where stages would send {seconds_text(own)} inside",
            ),
            candidates=(mesh_order(plan, [axis, *(name for name in plan.mesh.names if name != axis)]),),
        )
