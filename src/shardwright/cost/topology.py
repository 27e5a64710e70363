"""SW201, SW202 and SW204: axes on links that they should not be on, and messages too small for the links they are on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardwright.core.checks import drafts as core_drafts
from shardwright.core.checks.edits import mesh_order, resized
from shardwright.core.findings.codes import LATENCY_INFO_SHARE
from shardwright.core.findings.draft import Candidate, Draft, Key
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, count, every, percent, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.cost.collectives import Rates, time_of
from shardwright.cost.links import Laid, lay
from shardwright.cost.machine import Machine
from shardwright.cost.step import Times, seconds_of, timed
from shardwright.cost.wording import rate_text, seconds_text

HOT = ("expert", "tensor")
"""Roles whose collectives are on the way of every layer's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A plan on a machine, with the time of one execution of each of its collectives."""

    plan: Plan
    laid: Laid
    times: Times

    @classmethod
    def of(cls, plan: Plan, machine: Machine) -> Scene:
        laid = lay(plan.mesh, machine)
        return cls(plan=plan, laid=laid, times=timed(plan, laid).times)

    @property
    def rates(self) -> Rates:
        numbers = self.laid.machine.numbers
        assert numbers is not None
        return Rates.of(numbers, "used")

    def seconds(self, axes: Iterable[str] | None = None) -> float:
        """Seconds a step of the collectives over any of the axes, or of all: those that have a time."""
        wanted = None if axes is None else set(axes)
        pairs = zip(self.plan.collectives, self.times, strict=True)
        return sum(seconds_of(one, time) or 0 for one, time in pairs if wanted is None or wanted & set(one.axes))


def topology(plan: Plan, machine: Machine) -> tuple[Finding, ...]:
    """The findings of a plan on a machine, each with the first fix that was planned and mends it."""
    scene = Scene.of(plan, machine)
    found = {draft.key: draft for draft in _drafts(scene)}
    errors = {draft.key for draft in core_drafts(plan) if draft.finding.severity == "error"} if found else set()

    def holds(draft: Draft, candidate: Candidate) -> bool:
        after = _after(candidate, plan, machine, errors)
        return after is not None and draft.key not in after and after <= set(found)

    return tuple(draft.settled(lambda one, d=draft: holds(d, one)) for draft in found.values())


def _after(candidate: Candidate, plan: Plan, machine: Machine, errors: set[Key]) -> set[Key] | None:
    """The findings that are more than information after an edit; None where it cannot be or brings a new error."""
    try:
        changed = resolve(candidate.edit(plan.request))
    except FindingsError:
        return None
    if changed.mesh.num_devices != machine.num_devices:
        return None
    if {draft.key for draft in core_drafts(changed) if draft.finding.severity == "error"} - errors:
        return None
    return {draft.key for draft in _drafts(Scene.of(changed, machine)) if draft.finding.severity != "info"}


def _drafts(scene: Scene) -> Iterator[Draft]:
    yield from _hot_axes_outside(scene)
    yield from _open_lines(scene)
    yield from _small_messages(scene)


def _hot_axes_outside(scene: Scene) -> Iterator[Draft]:
    plan, laid, rates = scene.plan, scene.laid, scene.rates
    domain, inside = ("slice", "of a link") if rates.is_torus else ("node", "inside one")
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        roles = _hot_roles(plan, axis)
        spans = laid.domains[axis]
        if not roles or spans == 1:
            continue
        size = plan.mesh.size(axis)
        out = "no figure" if rates.out_bytes_per_s is None else rate_text(rates.out_bytes_per_s)
        seconds, total = scene.seconds([axis]), scene.seconds()
        finding = Finding(
            code="SW201",
            severity="warning",
            where=f"axis '{axis}' as {every(roles)}",
            position=plan.request.layout.mesh[axis].position,
            found=f"{product(plan.mesh, [axis])} lies over {count(spans, domain)}: {out} out of a device, "
            f"in place of {rate_text(rates.link_bytes_per_s)} {inside}",
            needed=f"'{axis}' within one {domain}, which has {count(laid.machine.domain_devices, 'device')}",
            cost=f"{seconds_text(seconds)} of {seconds_text(total)} of communication a step" if seconds else "",
        )
        smaller = reversed(divisors(size)[:-1])
        candidates = (*_orders(plan, axis), *(c for s in smaller for c in resized(plan, axis, s)))
        yield Draft(finding=finding, candidates=candidates)


def _hot_roles(plan: Plan, axis: str) -> list[str]:
    layout, present = plan.request.layout, plan.request.table.components
    hot = ("tensor",) if layout.move_moe == "weights" else HOT
    return [role for role in hot if any(layout.role(axis, component) == role for component in present)]


def _orders(plan: Plan, axis: str) -> Iterator[Candidate]:
    """The mesh with this axis last, and with every hot axis behind the others."""
    names = plan.mesh.names
    hot = [name for name in names if _hot_roles(plan, name)]
    for last in ([axis], hot):
        order = [name for name in names if name not in last] + last
        if order != list(names):
            yield mesh_order(plan, order)


def _open_lines(scene: Scene) -> Iterator[Draft]:
    """One draft for the axes that a longer torus, or a whole dim of this one, would carry both ways round."""
    plan, laid = scene.plan, scene.laid
    used = {axis for one in plan.collectives for axis in one.axes}
    open_axes = {
        axis: lines
        for axis in plan.mesh.larger_than_one(plan.mesh.names)
        if axis in used and (lines := [line for line in laid.group([axis]).lines if line.size > 2 and not line.closed])
    }
    if not open_axes:
        return
    split = [axis for axis in open_axes if laid.is_split(axis)]
    numbers = laid.machine.numbers
    assert numbers is not None
    multiple = numbers.whole("wraps_at_multiples_of_chips")
    shape = "x".join(map(str, laid.machine.shape))
    told = [
        f"{axis} {plan.mesh.size(axis)}: an open line of {every(line.size for line in lines)}"
        + (", a part of a ring" if axis in split else "")
        for axis, lines in open_axes.items()
    ]
    now, closed = scene.seconds(open_axes), _seconds_if_closed(scene, set(open_axes))
    finding = Finding(
        code="SW202",
        severity="warning" if split else "info",
        where=f"{every(repr(axis) for axis in open_axes)} on a torus of {shape}",
        position=plan.request.layout.mesh[next(iter(open_axes))].position,
        found="\n".join(told),
        needed="sizes of mesh axes that take whole dims of the torus"
        if split
        else f"a slice whose dims are multiples of {multiple}, where links wrap around",
        cost=f"{seconds_text(now)} of communication a step, where rings would take {seconds_text(closed)}",
    )
    whole = sorted({laid.dims[piece.dim].size for axis in split for piece in laid.pieces[axis]})
    yield Draft(finding=finding, candidates=tuple(c for axis in split for s in whole for c in resized(plan, axis, s)))


def _seconds_if_closed(scene: Scene, axes: set[str]) -> float:
    total = 0.0
    for one in scene.plan.collectives:
        if axes & set(one.axes):
            group = scene.laid.group(one.axes, one.subgroup)
            group = replace(group, lines=tuple(replace(line, closed=line.size > 2) for line in group.lines))
            total += seconds_of(one, time_of(one.kind, one.bytes_per_device, group, scene.rates)) or 0
    return total


def _small_messages(scene: Scene) -> Iterator[Draft]:
    """One draft where a good part of the communication is waiting to begin."""
    pairs = [(one, time) for one, time in zip(scene.plan.collectives, scene.times, strict=True) if time is not None]
    waiting = [(one, time) for one, time in pairs if time.waits and time.seconds > 0]
    waited, total = sum(time.seconds * one.count_per_step for one, time in waiting), scene.seconds()
    if not waiting or waited < LATENCY_INFO_SHARE.value * total:
        return
    one, time = max(waiting, key=lambda pair: pair[1].seconds * pair[0].count_per_step)
    number = sum(one.count_per_step for one, _ in waiting)
    yield Draft(
        finding=Finding(
            code="SW204",
            severity="info",
            where=f"collectives of {scene.plan.request.table.name} under layout '{scene.plan.request.layout.name}'",
            found=f"{count(number, 'collective')} a step, of {sum(one.count_per_step for one in scene.plan.collectives)}, "
            f"wait for the links longer than they send; the most of it {one.kind} over {every(one.axes)} "
            f"in '{one.component}': {bytes_text(one.bytes_per_device)}, {seconds_text(time.seconds)} each",
            needed=f"messages of {bytes_text(_worth_sending(scene, one.kind, one.axes, time.latency_s))} or more there",
            cost=f"{seconds_text(waited)} of {seconds_text(total)} of communication a step, {percent(waited / total)}",
        )
    )


def _worth_sending(scene: Scene, kind: str, axes: Iterable[str], latency_s: float) -> float:
    """The bytes that take as long as it takes to begin."""
    # So many that what it takes to begin is nothing beside them.
    large = 10**15
    time = time_of(kind, large, scene.laid.group(axes), scene.rates)
    assert time is not None
    return large * latency_s / time.seconds
