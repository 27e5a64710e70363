"""How collectives over an entire TPU slice are done: what `--hops auto` chooses on a machine, by time.

All ways are priced with the same closed forms (``steps/collectives.py``): one collective as the all-reduce that the compiler makes of it, two
hops along each split of the torus and in both orders, and chunks whose hops run at the same time where the chip does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from shardwright.core.layout.auto import HOPS, AutoChoice
from shardwright.core.mesh.hops import AUTO, ONE, Route, has_dims, rewritten
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.collectives import step_collectives
from shardwright.core.plan.movement import Collective, collectives
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, time_of_sent


def choose_hops(plan: Plan, mapping: MeshMapping) -> Plan:
    """The plan with the fastest route of the way that is asked for; unchanged where no collective of it is over an entire slice."""
    whole, chip = plan.mesh.whole_slice, mapping.machine.numbers
    if whole is None or plan.pipeline is not None or chip is None:
        return plan
    in_one = plan.collectives if whole.route == ONE else _collectives(plan, ONE)
    over_all = [planned for planned in in_one if _is_rewritten(plan, planned)]
    routes = {_text(plan, over_all, route): route for route in whole.routes(plan.request.hops)}
    if not over_all or not routes:
        return plan
    hops = {
        name: [(one, hop) for one, of_one in zip(over_all, found, strict=True) for hop in of_one]
        for name, route in routes.items()
        if all(
            found := [
                _hops(planned.kind, planned.axes, planned.bytes_per_device, plan.mesh, route, mapping)
                for planned in over_all
            ]
        )
    }
    seconds = {
        name: sum(hop.seconds * one.count_per_step for one, hop in of_route if hop.seconds)
        for name, of_route in hops.items()
        if all(hop.seconds is not None for _, hop in of_route)
    }
    if not seconds:
        return plan
    chosen = min(seconds, key=lambda name: seconds[name])
    sent = {name: round(sum(hop.sent_bytes * one.count_per_step for one, hop in hops[name])) for name in seconds}
    choice = AutoChoice(what=HOPS, chosen=chosen, wire_bytes=sent, seconds=seconds)
    plan = plan if routes[chosen] == whole.route else _under(plan, routes[chosen])
    return replace(plan, choices=(*(other for other in plan.choices if other.what != HOPS), choice))


def in_one(request: Request) -> Request:
    """The request with collectives over an entire slice in one piece, of which ``choose_hops`` times the routes; unchanged where a way is
    asked for."""
    chip = request.chip
    if chip is None or chip.whole_slice is None or chip.whole_slice.route is not None or request.hops != AUTO:
        return request
    return replace(request, chip=replace(chip, whole_slice=replace(chip.whole_slice, route=ONE)))


def _text(plan: Plan, over_all: Sequence[PlannedCollective], route: Route) -> str:
    """A route in words. Where mesh axes divide dims of the torus otherwise, two hops are over axes of the mesh, and named by them."""
    whole, shape = plan.mesh.whole_slice, plan.mesh.shape
    assert whole is not None
    by_route = _mesh(plan.mesh, route).whole_slice
    assert by_route is not None
    found = {axes for axes in {planned.axes for planned in over_all} if not has_dims(axes, shape, by_route)}
    if not found or route != next(iter(whole.routes("two")), ONE):
        return whole.text(route)
    if len(found) > 1:
        return "two: last axis, then the others"
    ((*others, last),) = found
    return f"two: {last}, then {' '.join(others)}"


def _under(plan: Plan, route: Route) -> Plan:
    """The plan with another route. Nothing but its collectives depends on it."""
    request, mesh = plan.request, _mesh(plan.mesh, route)
    assert request.chip is not None
    request = replace(request, chip=replace(request.chip, whole_slice=mesh.whole_slice))
    return replace(plan, request=request, mesh=mesh, collectives=_collectives(plan, route))


def _collectives(plan: Plan, route: Route) -> tuple[PlannedCollective, ...]:
    return step_collectives(plan.request, _mesh(plan.mesh, route), plan.tensors, plan.quantized)


@lru_cache(maxsize=256)
def _mesh(mesh: Mesh, route: Route) -> Mesh:
    """A mesh with another route."""
    assert mesh.whole_slice is not None
    return replace(mesh, whole_slice=replace(mesh.whole_slice, route=route))


def _is_rewritten(plan: Plan, one: PlannedCollective) -> bool:
    mesh = plan.mesh
    return rewritten(one.kind, mesh.size(one.axes), mesh.num_devices, mesh.whole_slice)


class _Hop(NamedTuple):
    """One execution of a hop: its seconds, None over a link without a figure, and the bytes that a device sends."""

    seconds: float | None
    sent_bytes: float


@lru_cache(maxsize=16384)
def _hops(
    kind: str, axes: tuple[str, ...], num_bytes: int, mesh: Mesh, route: Route, mapping: MeshMapping
) -> tuple[_Hop, ...]:
    """The hops of a collective over the entire slice along a route; none where the mesh does not have its dims."""
    whole, chip = mesh.whole_slice, mapping.machine.numbers
    assert whole is not None
    assert chip is not None
    assert kind in ("all-gather", "reduce-scatter")
    first = next(iter(whole.routes("two")), ONE)
    if route != first and not has_dims(axes, mesh.shape, replace(whole, route=route)):
        return ()
    rates, found = Rates.of(chip, "used"), collectives(kind, axes, num_bytes, _mesh(mesh, route))
    return tuple(_hop(hop, mesh, mapping, rates) for hop in found)


def _hop(hop: Collective, mesh: Mesh, mapping: MeshMapping, rates: Rates) -> _Hop:
    time = time_of_sent(hop, hop.elements_per_device, mapping, rates)
    devices = mesh.size(hop.axes) if hop.subgroup is None else hop.subgroup.size
    passes = 2 if hop.compiled_as else 1
    return _Hop(time and time.seconds, passes * hop.elements_per_device * (devices - 1) / devices)
