"""The one place where a fix is priced beside what stands, and where it is decided whether it is printed.

A fix that ends an error is printed. Any other is printed where the plan calls it better: a fix of a finding about memory is smaller, that of
any other is faster, or smaller and not slower. ``core/findings/effect.py`` compares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from shardwright.core.checks import drafts, trials
from shardwright.core.checks.memory import cures
from shardwright.core.checks.rows import rows_and_tokens
from shardwright.core.estimate.step_cost import StepCost
from shardwright.core.findings.codes import PAID_IN_MEMORY, TOO_LARGE
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.effect import Effect, Price
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.resolution.request import Request
from shardwright.cost.choices.hops import choose_hops, in_one
from shardwright.cost.choices.moe import choose_by_time
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.stages import assign_by_time, with_unit_costs
from shardwright.cost.steps.pipeline import TimedPipeline, timed_pipeline
from shardwright.cost.steps.step import timed
from shardwright.cost.wording import seconds_text

MOST_PRICED = 4
"""Candidates of one finding that are priced before none is called better."""

LEAST_GAIN: Mapping[str, float] = {"SW206": 0.05}
"""The share of the step by which a fix has to be faster, where the finding is about its time as such."""

Settle = Callable[[Draft, Callable[[Candidate], bool]], Finding]
"""The finding of a draft with its fix; the function says whether a candidate ends it."""


def with_choices(plan: Plan, mapping: MeshMapping, plan_again: Callable[[Request], Plan]) -> Plan:
    """The plan with all that is chosen by time on a machine. ``plan_again``: plans a request with another choice."""
    timely = assign_by_time(choose_by_time(plan, mapping, plan_again), mapping, plan_again)
    return choose_hops(timely, mapping)


def price_of(plan: Plan, mapping: MeshMapping) -> Price:
    """What a plan with its choices asks of a machine."""
    chip = mapping.machine.numbers
    assert chip is not None
    pipeline = None if plan.pipeline is None else timed_pipeline(plan, mapping, chip, "used")
    step = timed(plan, mapping).step if plan.pipeline is None else None if pipeline is None else pipeline.step
    return price_at(plan, step, pipeline)


def price_at(plan: Plan, step: StepCost | None, pipeline: TimedPipeline | None) -> Price:
    """The same where its step is known, and its pipeline in seconds."""
    price = _price(plan, None if step is None or lacks_rows(plan) else step.seconds)
    if pipeline is None:
        return price
    run = pipeline.pipeline.run
    return replace(price, idle_seconds=run.seconds - sum(run.busy) / len(run.busy))


def priced_request(request: Request, machine: Machine) -> Price:
    """The price of a request that is planned for it. Raises FindingsError where there is no plan."""
    plan = resolve(with_unit_costs(in_one(request), machine))
    if plan.mesh.num_devices != machine.num_devices:
        return _price(plan, None)
    mapping = map_mesh(plan.mesh, machine)
    again = partial(_resolved, machine=machine)
    return price_of(with_choices(plan, mapping, again), mapping)


def lacks_rows(plan: Plan) -> bool:
    """Whether devices have no row or no token, or unequal numbers of them: then a step has no time."""
    return any(True for _ in rows_and_tokens(plan))


def _resolved(request: Request, machine: Machine) -> Plan:
    return resolve(with_unit_costs(request, machine))


def _price(plan: Plan, seconds: float | None) -> Price:
    request = plan.request
    return Price(
        seconds=seconds,
        bytes_per_device=plan.memory.total_bytes_per_device,
        tokens=request.batch * request.length,
        devices=plan.mesh.num_devices,
    )


def advised(plan: Plan, machine: Machine, before: Price, elsewhere: Sequence[Candidate] = ()) -> tuple[Finding, ...]:
    """The plan's findings, each with the first fix that the plan calls better. ``elsewhere``: layouts that a device with too little memory
    may have instead."""
    if not any(finding.fix or finding.code == TOO_LARGE for finding in plan.findings):
        return plan.findings
    settle = settling(plan, machine, before)
    found = {draft.key: draft for draft in drafts(plan)}
    ends = trials(plan, found.values(), lambda request: resolve(with_unit_costs(request, machine), collectives=False))
    return tuple(_advised(finding, found, ends, settle, plan, elsewhere) for finding in plan.findings)


def _advised(
    finding: Finding,
    found: dict[tuple[str, str | None, str], Draft],
    ends: Callable[[Draft, Candidate], bool],
    settle: Settle,
    plan: Plan,
    elsewhere: Sequence[Candidate],
) -> Finding:
    draft = found.get((finding.code, finding.tensor, finding.where))
    if draft is None or not (finding.fix or finding.code == TOO_LARGE):
        return finding
    texts = [candidate.text for candidate in draft.candidates]
    # The core has tried these already, and they do not end the finding.
    refused = set(texts[: texts.index(finding.fix)] if finding.fix in texts else texts)
    candidates = draft.candidates
    if finding.code == TOO_LARGE:
        candidates = tuple(cures(plan, elsewhere))

    def is_fix(candidate: Candidate) -> bool:
        if candidate.text in refused:
            return False
        return candidate.text == finding.fix or ends(draft, candidate)

    return settle(replace(draft, finding=replace(finding, fix=""), candidates=candidates), is_fix)


def first_that_ends(draft: Draft, ends: Callable[[Candidate], bool]) -> Finding:
    """Where no chips are known, by which a fix could be priced."""
    return draft.settled(ends)


def settling_on(plan: Plan, machine: Machine | None) -> Settle:
    """How findings get their fixes about what was made of a plan, as a compiled program: by price where the machine has numbers."""
    if machine is None or machine.numbers is None:
        return first_that_ends
    return settling(plan, machine, price_of(plan, map_mesh(plan.mesh, machine)))


def settling(plan: Plan, machine: Machine, before: Price) -> Settle:
    """How the findings of a plan get their fixes. ``before``: what the plan asks of the machine. Each candidate is priced once."""
    effects: dict[str, Effect | None] = {}

    def effect_of(candidate: Candidate) -> Effect | None:
        if candidate.text not in effects:
            effects[candidate.text] = _effect(candidate, plan.request, machine, before)
        return effects[candidate.text]

    def settle(draft: Draft, ends: Callable[[Candidate], bool]) -> Finding:
        finding = draft.finding
        for_memory, worse = finding.code in PAID_IN_MEMORY, list[Effect]()
        for candidate in draft.candidates:
            if len(worse) == (MOST_PRICED if finding.code not in LEAST_GAIN else 2 * MOST_PRICED):
                break
            if not ends(candidate):
                continue
            effect = effect_of(candidate)
            if finding.severity == "error" or (effect is not None and _is_printed(finding, effect)):
                return replace(finding, fix=candidate.text, effect=effect)
            if effect is not None:
                worse.append(effect)
        return replace(finding, fix="", tried=_tried(worse, for_memory=for_memory))

    return settle


def _is_printed(finding: Finding, effect: Effect) -> bool:
    if finding.code in LEAST_GAIN:
        return effect.is_faster_by(LEAST_GAIN[finding.code])
    return effect.is_better(for_memory=finding.code in PAID_IN_MEMORY)


def _effect(candidate: Candidate, request: Request, machine: Machine, before: Price) -> Effect | None:
    try:
        after = priced_request(candidate.edit(request), machine)
    except (FindingsError, InputError):
        return None
    return Effect(before=before, after=after, text=effect_text(before, after))


def effect_text(before: Price, after: Price) -> str:
    """A step before and after: ``28.4 s to 59.4 s, 60.1 GiB to 41.2 GiB a device``."""
    parts: list[str] = []
    if after.seconds is not None:
        now = "" if before.seconds is None else seconds_text(before.seconds)
        then = seconds_text(after.seconds)
        parts.append(
            f"{now}, as before" if now == then and after.tokens == before.tokens else f"{now} to {then}".lstrip()
        )
        if after.tokens != before.tokens:
            parts[0] += (
                f" for {after.tokens:,} {'token' if after.tokens == 1 else 'tokens'} in place of {before.tokens:,}"
            )
    if after.bytes_per_device != before.bytes_per_device:
        parts.append(f"{bytes_text(before.bytes_per_device)} to {bytes_text(after.bytes_per_device)} a device")
    return ", ".join(parts) or f"{bytes_text(after.bytes_per_device)} a device, as before"


def _tried(worse: Sequence[Effect], *, for_memory: bool) -> str:
    """Why there is no fix; empty where nothing would end the finding."""
    if not worse:
        return ""
    best = min(worse, key=lambda effect: _rank(effect, for_memory=for_memory))
    tried = "the change" if len(worse) == 1 else f"none of the {len(worse)} changes"
    wanted = "smaller" if for_memory else "faster"
    verb = "that would end this is not" if len(worse) == 1 else "that would end this is"
    return f"{tried} {verb} {wanted} by this plan: {'' if len(worse) == 1 else 'the best is '}{best.text}"


def _rank(effect: Effect, *, for_memory: bool) -> tuple[bool, float]:
    """Sorts the better effect first."""
    after = effect.after.device_seconds
    if for_memory or after is None:
        return after is None and not for_memory, effect.after.bytes_per_device
    return False, after
