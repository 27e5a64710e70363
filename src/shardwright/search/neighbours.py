"""The layouts and steps that differ from a plan in one change, and which of them are faster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, permutations

from shardwright.core.checks import drafts
from shardwright.core.checks.edits import entry, mesh_order, moe_move, option
from shardwright.core.findings.draft import Candidate
from shardwright.core.findings.effect import Effect, Price
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.policies.policy import BASES
from shardwright.core.resolution.mesh_sizes import resized_mesh
from shardwright.core.resolution.request import Request
from shardwright.cost.advice import effect_text, priced_request
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.stages import with_unit_costs
from shardwright.cost.wording import seconds_text
from shardwright.search.space.settings import LOSS_CHUNKS, STORING, tried_schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A plan in one change from another, that fits, has no error that the other has not, and trains faster."""

    change: Candidate
    effect: Effect

    @property
    def ratio(self) -> float:
        """How many times as fast it trains."""
        before, after = self.effect.before.device_seconds, self.effect.after.device_seconds
        assert before is not None
        assert after is not None
        return before / after


def with_faster_neighbour(plan: Plan, machine: Machine) -> Plan:
    """The plan with SW208, where one change of a few makes its step faster by more than half of its range. Unchanged where it has an error, no
    time, or a finding whose fix gains as much."""
    step = plan.step
    if plan.errors or step is None or step.low_seconds is None or step.high_seconds is None:
        return plan
    half_width = (step.high_seconds - step.low_seconds) / 2 / step.seconds
    before = Price(
        seconds=step.seconds,
        bytes_per_device=plan.memory.total_bytes_per_device,
        tokens=plan.request.batch * plan.request.length,
        devices=plan.mesh.num_devices,
    )
    neighbour = next(faster_neighbours(plan, machine, before, BASES, 1 + half_width), None)
    gained = [finding.effect.after.seconds for finding in plan.findings if finding.effect is not None]
    after = None if neighbour is None else neighbour.effect.after.seconds
    if neighbour is None or after is None or any(seconds is not None and seconds <= after for seconds in gained):
        return plan
    finding = Finding(
        code="SW208",
        severity="info",
        where=f"a step of {plan.request.table.name} on {machine.text}",
        found=f"{seconds_text(step.seconds)}; with one change {seconds_text(after)}, {neighbour.ratio:.3g} times as fast a token",
        needed="nothing; `shardwright search --like` lists such changes, and `shardwright search` tries all layouts",
        fix=neighbour.change.text,
        effect=neighbour.effect,
    )
    return replace(plan, findings=worst_first((*plan.findings, finding)))


def faster_neighbours(
    plan: Plan, machine: Machine, before: Price, policies: Sequence[str], least_ratio: float = 1.0
) -> Iterator[Neighbour]:
    """The neighbours that are more than ``least_ratio`` times as fast as a plan, the fastest first. ``before``: the plan's price."""
    priced = [
        neighbour
        for change in one_change(plan, policies)
        if (neighbour := _priced(change, plan, machine, before)) is not None and neighbour.ratio > least_ratio
    ]
    allowed = {(finding.code, finding.tensor, finding.where) for finding in plan.errors}
    for neighbour in sorted(
        priced, key=lambda item: (-item.ratio, item.effect.after.bytes_per_device, item.change.text)
    ):
        try:
            changed = resolve(with_unit_costs(neighbour.change.edit(plan.request), machine))
        except (FindingsError, InputError):
            continue
        errors = {draft.key for draft in drafts(changed) if draft.finding.severity == "error"}
        if errors <= allowed:
            yield neighbour


def one_change(plan: Plan, policies: Sequence[str]) -> Iterator[Candidate]:
    """Every change of one thing: a factor from one mesh axis to another, two neighbouring axes in the other order, a movement, the
    microbatches, the policy, the chunks of the loss, the schedule, an option of an axis."""
    request, layout = plan.request, plan.request.layout
    sizes = {axis: plan.mesh.size(axis) for axis in plan.mesh.names}
    for smaller, larger in permutations(sizes, 2):
        if sizes[smaller] > 1:
            factor = divisors(sizes[smaller])[1]
            yield resized_mesh(request, {**sizes, smaller: sizes[smaller] // factor, larger: sizes[larger] * factor})
    wide = [axis for axis in sizes if sizes[axis] > 1]
    for first, second in pairwise(wide):
        swapped = {first: second, second: first}
        yield mesh_order(plan, [swapped.get(axis, axis) for axis in sizes])
    yield from _movements(plan, wide)
    for number in (request.microbatches * 2, request.microbatches // 2):
        if number and request.batch % number == 0:
            yield option("microbatches", number)
    for policy in policies:
        if policy != request.remat:
            yield option("remat", policy)
    for chunks in LOSS_CHUNKS:
        if chunks != request.loss_chunks:
            yield option("loss-chunks", chunks)
    if plan.pipeline is not None:
        yield from (
            option("schedule", name)
            for name in tried_schedules(request.properties)
            if name != plan.pipeline.choice.schedule
        )
    for axis in wide:
        role = layout.entries[axis].elsewhere
        if role in STORING and plan.pipeline is not None:
            yield entry(plan, axis, keep_gathered=None if layout.entries[axis].keep_gathered else True)
        if role == "data":
            yield entry(plan, axis, optimizer=None if layout.entries[axis].optimizer else "shard", gradients=None)


def _movements(plan: Plan, wide: Iterable[str]) -> Iterator[Candidate]:
    layout = plan.request.layout
    roles = {role for axis in wide for role in layout.entries[axis].roles.values()}
    if "context" in roles:
        for way in ATTENTION_MOVES:
            if way != layout.move_attention:
                yield Candidate(text=f"--move attention={way}", edit=_attention(way))
    if "expert" in roles:
        for way in MOE_MOVES:
            if way not in (layout.move_moe, "auto"):
                yield moe_move(way)


def _attention(way: str):
    def edit(request: Request) -> Request:
        return replace(request, layout=replace(request.layout, move_attention=way))

    return edit


def _priced(change: Candidate, plan: Plan, machine: Machine, before: Price) -> Neighbour | None:
    """None for a change that has no plan or no time, or does not fit."""
    try:
        after = priced_request(change.edit(plan.request), machine)
    except (FindingsError, InputError):
        return None
    limit = None if plan.request.chip is None else plan.request.chip.usable_bytes
    if after.device_seconds is None or (limit is not None and after.bytes_per_device > limit):
        return None
    return Neighbour(change=change, effect=Effect(before=before, after=after, text=effect_text(before, after)))
