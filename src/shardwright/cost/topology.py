"""SW201, SW202, SW204 and SW205: axes on unsuitable links, messages too small for their links, and copies to the host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from shardwright.core.checks import drafts as core_drafts
from shardwright.core.checks.edits import by_way_of_nodes, mesh_order, moe_move, resized
from shardwright.core.findings.draft import Candidate, Draft, Key
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import LATENCY_INFO_SHARE
from shardwright.core.layout.wording import bytes_text, count, every, percent, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.planning import resolve
from shardwright.core.resolution.resolve import expert_axes
from shardwright.core.resolution.token_hops import TWO_HOPS, in_two_hops
from shardwright.cost.advice import Settle
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.on_host import on_host
from shardwright.cost.on_links import stages_on_links
from shardwright.cost.steps.collectives import Rates, time_of
from shardwright.cost.steps.step import Times, seconds_of, timed
from shardwright.cost.wording import rate_text, seconds_text

HOT = ("expert", "tensor")
"""Roles whose collectives are on the critical path of every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedPlan:
    """A plan on a machine, with the time of one execution of each of its collectives."""

    plan: Plan
    mapping: MeshMapping
    times: Times

    @classmethod
    def of(cls, plan: Plan, machine: Machine) -> TimedPlan:
        mapping = map_mesh(plan.mesh, machine)
        return cls(plan=plan, mapping=mapping, times=timed(plan, mapping).times)

    @property
    def rates(self) -> Rates:
        numbers = self.mapping.machine.numbers
        assert numbers is not None
        return Rates.of(numbers, "used")

    def seconds(self, axes: Iterable[str] | None = None) -> float:
        """Seconds a step of the collectives over any of the axes, or of all collectives; only those that have a time."""
        wanted = None if axes is None else set(axes)
        pairs = zip(self.plan.collectives, self.times, strict=True)
        return sum(seconds_of(one, time) or 0 for one, time in pairs if wanted is None or wanted & set(one.axes))


def topology(plan: Plan, machine: Machine, settle: Settle) -> tuple[Finding, ...]:
    """The findings of a plan on a machine, each with the first fix whose plan no longer has the finding, and is better."""
    timed_plan = TimedPlan.of(plan, machine)
    found = {draft.key: draft for draft in _drafts(timed_plan)}
    errors = {draft.key for draft in core_drafts(plan) if draft.finding.severity == "error"} if found else set()

    def holds(draft: Draft, candidate: Candidate) -> bool:
        after = _after(candidate, plan, machine, errors)
        return after is not None and draft.key not in after and after <= set(found)

    return tuple(settle(draft, lambda one, d=draft: holds(d, one)) for draft in found.values())


def _after(candidate: Candidate, plan: Plan, machine: Machine, errors: set[Key]) -> set[Key] | None:
    """The findings above severity info after an edit; None if it cannot be planned or adds an error."""
    try:
        changed = resolve(candidate.edit(plan.request))
    except FindingsError:
        return None
    if changed.mesh.num_devices != machine.num_devices:
        return None
    if {draft.key for draft in core_drafts(changed) if draft.finding.severity == "error"} - errors:
        return None
    return {draft.key for draft in _drafts(TimedPlan.of(changed, machine)) if draft.finding.severity != "info"}


def _drafts(timed_plan: TimedPlan) -> Iterator[Draft]:
    yield from _hot_axes_outside(timed_plan)
    yield from stages_on_links(timed_plan.plan, timed_plan.mapping, timed_plan.seconds)
    yield from _open_lines(timed_plan)
    yield from _small_messages(timed_plan)
    yield from on_host(timed_plan.plan, timed_plan.mapping)


def _hot_axes_outside(timed_plan: TimedPlan) -> Iterator[Draft]:
    plan, mapping, rates = timed_plan.plan, timed_plan.mapping, timed_plan.rates
    domain, inside = ("slice", "of a link") if rates.is_torus else ("node", "inside one")
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        roles = _hot_roles(plan, axis)
        spans = mapping.domains[axis]
        if not roles or spans == 1:
            continue
        size = plan.mesh.size(axis)
        out = "no figure" if rates.out_bytes_per_s is None else rate_text(rates.out_bytes_per_s)
        seconds, total = timed_plan.seconds([axis]), timed_plan.seconds()
        finding = Finding(
            code="SW201",
            severity="warning",
            where=f"axis '{axis}' as {every(roles)}",
            position=plan.request.layout.mesh[axis].position,
            found=f"{product(plan.mesh, [axis])} spans {count(spans, domain)}: {out} out of a device, "
            f"instead of {rate_text(rates.link_bytes_per_s)} {inside}",
            needed=f"'{axis}' within one {domain}, which has {count(mapping.machine.domain_devices, 'device')}",
            cost=f"{seconds_text(seconds)} of {seconds_text(total)} of communication a step" if seconds else "",
        )
        smaller = reversed(divisors(size)[:-1])
        candidates = (
            *_orders(plan, axis),
            *_in_two_hops(plan, axis, roles, size // spans),
            *(c for s in smaller for c in resized(plan, axis, s)),
        )
        yield Draft(finding=finding, candidates=candidates)


def _in_two_hops(plan: Plan, axis: str, roles: Sequence[str], inside: int) -> Iterator[Candidate]:
    """Each token once to a node, and from there to its experts: over the axes that there are, or over a new one too."""
    if list(roles) != ["expert"] or plan.request.layout.move_moe == "ring":
        return
    if axis == expert_axes(plan.request.layout, plan.mesh)[0] and len(expert_axes(plan.request.layout, plan.mesh)) > 1:
        yield moe_move(TWO_HOPS)
    else:
        yield from by_way_of_nodes(plan, axis, inside)


def _hot_roles(plan: Plan, axis: str) -> list[str]:
    layout, present = plan.request.layout, plan.request.table.components
    hot = ("tensor",) if layout.move_moe == "weights" else HOT
    # The first hop is made for links between nodes.
    if in_two_hops(plan.request, plan.mesh) and axis == expert_axes(layout, plan.mesh)[0]:
        hot = ("tensor",)
    return [role for role in hot if any(layout.role(axis, component) == role for component in present)]


def _orders(plan: Plan, axis: str) -> Iterator[Candidate]:
    """The mesh with this axis last, and the mesh with every hot axis after the others."""
    names = plan.mesh.names
    hot = [name for name in names if _hot_roles(plan, name)]
    for last in ([axis], hot):
        order = [name for name in names if name not in last] + last
        if order != list(names):
            yield mesh_order(plan, order)


def _open_lines(timed_plan: TimedPlan) -> Iterator[Draft]:
    """One draft for the axes that would be rings on a longer torus, or on an entire dim of this one."""
    plan, mapping = timed_plan.plan, timed_plan.mapping
    used = {axis for one in plan.collectives for axis in one.axes}
    open_axes = {
        axis: lines
        for axis in plan.mesh.larger_than_one(plan.mesh.names)
        if axis in used
        and (lines := [line for line in mapping.group([axis]).lines if line.size > 2 and not line.closed])
    }
    if not open_axes:
        return
    split = [axis for axis in open_axes if mapping.is_part_of_ring(axis)]
    numbers = mapping.machine.numbers
    assert numbers is not None
    multiple = numbers.integer("wraps_at_multiples_of_chips")
    shape = "x".join(map(str, mapping.machine.shape))
    open_line_texts = [
        f"{axis} {plan.mesh.size(axis)}: an open line of {every(line.size for line in lines)}"
        + (", a part of a ring" if axis in split else "")
        for axis, lines in open_axes.items()
    ]
    now, closed = timed_plan.seconds(open_axes), _seconds_if_closed(timed_plan, set(open_axes))
    finding = Finding(
        code="SW202",
        severity="warning" if split else "info",
        where=f"{every(repr(axis) for axis in open_axes)} on a torus of {shape}",
        position=plan.request.layout.mesh[next(iter(open_axes))].position,
        found="\n".join(open_line_texts),
        needed="sizes of mesh axes that take entire dims of the torus"
        if split
        else f"a slice whose dims are multiples of {multiple}, where links wrap around",
        cost=f"{seconds_text(now)} of communication a step, where rings would take {seconds_text(closed)}",
    )
    whole_dims = sorted({mapping.dims[segment.dim].size for axis in split for segment in mapping.segments[axis]})
    yield Draft(
        finding=finding, candidates=tuple(c for axis in split for s in whole_dims for c in resized(plan, axis, s))
    )


def _seconds_if_closed(timed_plan: TimedPlan, axes: set[str]) -> float:
    return sum(_if_closed(timed_plan, one) for one in timed_plan.plan.collectives if axes & set(one.axes))


def _if_closed(timed_plan: TimedPlan, one: PlannedCollective) -> float:
    group = timed_plan.mapping.group(one.axes, one.subgroup)
    group = replace(group, lines=tuple(replace(line, closed=line.size > 2) for line in group.lines))
    return seconds_of(one, time_of(one.kind, one.bytes_per_device, group, timed_plan.rates)) or 0.0


def _small_messages(timed_plan: TimedPlan) -> Iterator[Draft]:
    """One draft if a large share of the communication time is in latency-bound collectives."""
    pairs = [
        (one, time) for one, time in zip(timed_plan.plan.collectives, timed_plan.times, strict=True) if time is not None
    ]
    latency_bound = [(one, time) for one, time in pairs if time.is_latency_bound and time.seconds > 0]
    latency_bound_seconds, total = (
        sum(time.seconds * one.count_per_step for one, time in latency_bound),
        timed_plan.seconds(),
    )
    if not latency_bound or latency_bound_seconds < LATENCY_INFO_SHARE.value * total:
        return
    one, time = max(latency_bound, key=lambda pair: pair[1].seconds * pair[0].count_per_step)
    number = sum(one.count_per_step for one, _ in latency_bound)
    yield Draft(
        finding=Finding(
            code="SW204",
            severity="info",
            where=f"collectives of {timed_plan.plan.request.table.name} under layout '{timed_plan.plan.request.layout.name}'",
            found=f"{count(number, 'collective')} a step, of {sum(one.count_per_step for one in timed_plan.plan.collectives)}, "
            f"take longer to start than to send; the largest share of that time is {one.kind} over {every(one.axes)} "
            f"in '{one.component}': {bytes_text(one.bytes_per_device)}, {seconds_text(time.seconds)} each",
            needed=f"messages of {bytes_text(_latency_bytes(timed_plan, one.kind, one.axes, time.latency_s))} or more there",
            cost=f"{seconds_text(latency_bound_seconds)} of {seconds_text(total)} of communication a step, {percent(latency_bound_seconds / total)}",
        )
    )


def _latency_bytes(timed_plan: TimedPlan, kind: str, axes: Iterable[str], latency_s: float) -> float:
    """The bytes whose transfer takes as long as the latency."""
    # So many bytes that the latency is negligible.
    large = 10**15
    time = time_of(kind, large, timed_plan.mapping.group(axes), timed_plan.rates)
    assert time is not None
    return large * latency_s / time.seconds
