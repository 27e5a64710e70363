"""SW205: activations on the host whose copies take longer than making them again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.checks.edits import option
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.policies.policy import INPUT, Policy, read_policy
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.pipeline import timed_pipeline
from shardwright.cost.steps.step import HOST_RATE, timed, to_host_seconds
from shardwright.cost.wording import rate_text, seconds_text


def on_host(plan: Plan, mapping: MeshMapping) -> Iterator[Draft]:
    """One draft at most: a step that is shorter where what is on the host is made again, or a link to the host without a figure."""
    chip = mapping.machine.numbers
    assert chip is not None
    parts = [plan] if plan.pipeline is None else [stage for stage in plan.stage_plans if stage.memory.host_bytes]
    moved = max((part.memory.host_bytes * part.request.microbatches for part in parts), default=0)
    if not moved:
        return
    where, sent = "--remat", f"{bytes_text(moved)} of activations to the host and as much back"
    if HOST_RATE not in chip.numbers:
        yield Draft(
            finding=Finding(
                code="SW205",
                severity="info",
                where=where,
                found=f"a device sends {sent}, and no source was checked for the link of a {chip.name} to its host: the time of "
                "the step is without these copies",
                needed=f"nothing; {HOST_RATE} in a file of yours, --chips KIND:SHAPE+FILE, gives the link a figure",
            )
        )
        return
    again = _made_again(read_policy(plan.request.remat))
    ours = _step(plan, mapping)
    if ours is None or not ours.host_exposed_seconds or again is None:
        return
    theirs = _step(resolve(replace(plan.request, remat=again)), mapping)
    if theirs is None or theirs.seconds >= ours.seconds:
        return
    one_way = max(to_host_seconds(part, chip) or 0.0 for part in parts)
    yield Draft(
        finding=Finding(
            code="SW205",
            severity="warning",
            where=where,
            found=f"a device sends {sent} at {rate_text(chip.read(HOST_RATE))}, {seconds_text(one_way)} each way, of which "
            f"{seconds_text(ours.host_exposed_seconds)} is not hidden: a step of {seconds_text(ours.seconds)}, and of "
            f"{seconds_text(theirs.seconds)} where these activations are made again",
            needed="copies that take less time than making again what they keep",
            cost=f"{seconds_text(ours.seconds - theirs.seconds)} a step",
        ),
        candidates=(option("remat", again),),
    )


def _made_again(policy: Policy) -> str | None:
    """The policy with what is on the host made again; None where that is the input of layers alone, which cannot be."""
    parts = tuple(
        replace(
            part,
            host=tuple(name for name in part.host if name == INPUT),
            recompute=(*part.recompute, *(name for name in part.host if name != INPUT and part.base != "full")),
        )
        for part in policy.parts
    )
    changed = Policy(parts=parts)
    return None if changed == policy else changed.text


def _step(plan: Plan, mapping: MeshMapping) -> StepCost | None:
    chip = mapping.machine.numbers
    assert chip is not None
    if plan.pipeline is None:
        return timed(plan, mapping).step
    found = timed_pipeline(plan, mapping, chip, "used")
    return None if found is None else found.step
