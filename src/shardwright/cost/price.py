"""Adds to a plan its times on a machine, of every collective and of a step, and the findings about links."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.findings.draft import Candidate
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.auto import HOPS, AutoChoice
from shardwright.core.pipeline.derived import collectives_of
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan, with_all_to_one
from shardwright.core.stages.planned import Pipeline
from shardwright.cost.advice import advised, lacks_rows, price_at, settling, with_choices
from shardwright.cost.answer import answer_of
from shardwright.cost.exposed import exposed
from shardwright.cost.hardware.chips import ChipNumbers, Reading
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.missing import missing
from shardwright.cost.stages import with_unit_costs
from shardwright.cost.steps.pipeline import TimedPipeline, timed_pipeline
from shardwright.cost.steps.routing import EVEN, shares_of_one
from shardwright.cost.steps.step import Timed, seconds_of, timed, times_of
from shardwright.cost.topology import topology
from shardwright.cost.wording import seconds_text


def price(plan: Plan, machine: Machine, elsewhere: Sequence[Candidate] = ()) -> Plan:
    """The plan with seconds; unchanged on simulated devices, which have no link rates. ``elsewhere``: other layouts that a finding may name.

    A fix that the plan calls worse than what stands is taken out of its finding (``advice.py``). Where devices have no row there is no
    ``step``. The choice of `auto` is made again, by time. Collectives over a link without a figure keep ``seconds`` None, and
    then there is no ``step``. Raises FindingsError if the plan of another option has errors in its mesh.
    """
    if machine.numbers is None:
        return plan
    mapping = map_mesh(plan.mesh, machine)
    plan = with_choices(plan, mapping, partial(make_plan, costed=partial(with_unit_costs, machine=machine)))
    by_reading = _timed_pipelines(plan, mapping)
    plan = _with_stages(plan, by_reading[0])
    # In stages the step follows from their own collectives.
    times = times_of(plan, mapping) if plan.pipeline is not None else ()
    used, low, high = (
        timed(plan, mapping, reading)
        if plan.pipeline is None
        else Timed(times=times, step=None if pipeline is None else pipeline.step)
        for reading, pipeline in zip(READINGS, by_reading, strict=True)
    )
    step = None if lacks_rows(plan) else _between(machine.numbers, used.step, low.step, high.step)
    all_to_one = with_all_to_one(plan)
    step = _with_one_that_gets_all(all_to_one, mapping, step)
    before = price_at(plan, used.step, by_reading[0])
    plan = replace(plan, findings=advised(plan, machine, before, elsewhere), step=step)
    plan = replace(plan, answer=answer_of(plan, mapping, used.times, all_to_one.memory))
    settle = settling(plan, machine, before)
    return replace(
        plan,
        collectives=tuple(
            replace(one, seconds=seconds_of(one, time)) for one, time in zip(plan.collectives, used.times, strict=True)
        ),
        findings=worst_first(
            (
                *_timed_choices(plan),
                *topology(plan, machine, settle),
                *exposed(plan, machine, settle, elsewhere),
                *(() if lacks_rows(plan) else missing(plan, machine.numbers, used.times)),
            )
        ),
    )


READINGS: tuple[Reading, ...] = ("used", "fastest", "slowest")


def _timed_pipelines(plan: Plan, mapping: MeshMapping) -> Sequence[TimedPipeline | None]:
    """The pipeline in seconds by each reading of the machine's numbers; None where a collective has no time, and without stages."""
    chip = mapping.machine.numbers
    assert chip is not None
    return [None if plan.pipeline is None else timed_pipeline(plan, mapping, chip, reading) for reading in READINGS]


def _with_stages(plan: Plan, timed: TimedPipeline | None) -> Plan:
    """The plan with its pipeline in seconds. The rank that computes the longest may be another one by seconds than by flops: then the
    collectives are those of that rank."""
    if timed is None or plan.pipeline is None:
        return plan
    pipeline = timed.pipeline
    weights = [row for row in plan.tensors if row.kind == "weight"]
    return replace(
        plan,
        pipeline=pipeline,
        collectives=collectives_of(
            plan.request, plan.mesh, pipeline, plan.stage_plans, weights, plan.ends_plan, plan.program, plan.quantized
        ),
        findings=_with_seconds(plan.findings, plan.pipeline, pipeline),
    )


def _with_seconds(findings: Iterable[Finding], before: Pipeline, after: Pipeline) -> tuple[Finding, ...]:
    """The findings with the share of the time in which stages are idle by seconds, where it was by flops."""

    def said(text: str) -> str:
        return text.replace(before.idle_text, after.idle_text)

    return tuple(replace(one, found=said(one.found), cost=said(one.cost)) for one in findings)


def _between(chip: ChipNumbers, used: StepCost | None, low: StepCost | None, high: StepCost | None) -> StepCost | None:
    """The step with its range: the fastest and the slowest numbers, and the error that estimates for such chips have had."""
    if used is None or low is None or high is None:
        return None
    error = 1 + (chip.read("estimate_error_share") if "estimate_error_share" in chip.numbers else 0.0)
    return replace(used, low_seconds=low.seconds / error, high_seconds=high.seconds * error)


def _with_one_that_gets_all(plan: Plan, mapping: MeshMapping, step: StepCost | None) -> StepCost | None:
    """The step, with the seconds that it would take if one device of each group received all rows that its experts may. ``plan``: with buffers
    for them."""
    chip, shares = mapping.machine.numbers, shares_of_one(plan)
    if step is None or chip is None or shares <= EVEN:
        return step
    if plan.pipeline is None:
        longest = timed(plan, mapping, shares=shares).step
    else:
        pipeline = timed_pipeline(plan, mapping, chip, "used", shares)
        longest = None if pipeline is None else pipeline.step
    return replace(step, seconds_if_one_device_gets_all=None if longest is None else longest.seconds)


def _timed_choices(plan: Plan) -> Iterable[Finding]:
    """The plan's findings; the one about `auto` gets the times of its options."""
    timed_choices = [choice for choice in plan.choices if choice.seconds and choice.what != HOPS]
    for finding in plan.findings:
        if finding.code == "SW105" and timed_choices:
            yield _timed_choice(finding, timed_choices[0])
        else:
            yield finding


def _timed_choice(finding: Finding, choice: AutoChoice) -> Finding:
    ordered = sorted(choice.seconds.items(), key=lambda item: item[1])
    most, least = ordered[-1][1], ordered[0][1]
    return replace(
        finding,
        found=f"'auto' chose '{choice.chosen}'; time of one layer, forward and backward:\n"
        + "\n".join(f"{option:<10}  {seconds_text(seconds)}" for option, seconds in ordered),
        needed=f"nothing; 'move: {{{choice.what.split('.')[1]}: {choice.chosen}}}' makes the choice explicit",
        cost=f"the most expensive option takes {most / least:.3g} times as long" if least else "",
    )
