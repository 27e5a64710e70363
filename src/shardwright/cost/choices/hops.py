"""How collectives over an entire TPU slice are done: what `--hops auto` chooses on a machine, by time.

All ways are priced with the same closed forms (``steps/collectives.py``): one collective as the all-reduce that the compiler makes of it, two
hops along each split of the torus and in both orders, and chunks whose hops run at the same time where the chip does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwright.core.layout.auto import HOPS, AutoChoice
from shardwright.core.mesh.hops import ONE, Route, WholeSlice, has_dims, rewritten
from shardwright.core.plan.collectives import step_collectives
from shardwright.core.plan.movement import collectives
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.cost.hardware.links import MeshMapping
from shardwright.cost.steps.collectives import Rates, time_of_planned
from shardwright.cost.steps.step import seconds_of


def choose_hops(plan: Plan, mapping: MeshMapping) -> Plan:
    """The plan with the fastest route of the way that is asked for; unchanged where no collective of it is over an entire slice."""
    whole, chip = plan.mesh.whole_slice, mapping.machine.numbers
    if whole is None or plan.pipeline is not None or chip is None:
        return plan
    over_all = [one for one in _under(plan, ONE).collectives if _is_rewritten(plan, one)]
    routes = {_text(plan, over_all, route): route for route in whole.routes(plan.request.hops)}
    if not over_all or not routes:
        return plan
    rates = Rates.of(chip, "used")
    by_route = {name: [_hops(plan, one, route) for one in over_all] for name, route in routes.items()}
    hops = {name: [hop for each in found for hop in each] for name, found in by_route.items() if all(found)}
    times = {
        name: [seconds_of(one, time_of_planned(one, mapping, rates)) for one in found] for name, found in hops.items()
    }
    seconds = {name: sum(filter(None, found)) for name, found in times.items() if None not in found}
    if not seconds:
        return plan
    chosen = min(seconds, key=lambda name: seconds[name])
    sent = {name: round(sum(_sent(plan, one) for one in hops[name])) for name in seconds}
    choice = AutoChoice(what=HOPS, chosen=chosen, wire_bytes=sent, seconds=seconds)
    plan = plan if routes[chosen] == whole.route else _under(plan, routes[chosen])
    return replace(plan, choices=(*(one for one in plan.choices if one.what != HOPS), choice))


def _text(plan: Plan, over_all: Sequence[PlannedCollective], route: Route) -> str:
    """A route in words. Where mesh axes divide dims of the torus otherwise, two hops are over axes of the mesh, and named by them."""
    whole, shape = plan.mesh.whole_slice, plan.mesh.shape
    assert whole is not None
    found = {one.axes for one in over_all if not has_dims(one.axes, shape, replace(whole, route=route))}
    if not found or route != next(iter(whole.routes("two")), ONE):
        return whole.text(route)
    if len(found) > 1:
        return "two: last axis, then the others"
    ((*others, last),) = found
    return f"two: {last}, then {' '.join(others)}"


def _under(plan: Plan, route: Route) -> Plan:
    """The plan with another route. Nothing but its collectives depends on it."""
    request, whole = plan.request, plan.mesh.whole_slice
    assert request.chip is not None
    assert whole is not None
    whole = replace(whole, route=route)
    request = replace(request, chip=replace(request.chip, whole_slice=whole))
    mesh = replace(plan.mesh, whole_slice=whole)
    found = step_collectives(request, mesh, plan.tensors, plan.quantized)
    return replace(plan, request=request, mesh=mesh, collectives=found)


def _is_rewritten(plan: Plan, one: PlannedCollective) -> bool:
    mesh = plan.mesh
    return rewritten(one.kind, mesh.size(one.axes), mesh.num_devices, mesh.whole_slice)


def _hops(plan: Plan, one: PlannedCollective, route: Route) -> list[PlannedCollective]:
    """A collective over the entire slice along a route; empty where the mesh does not have its dims."""
    whole = plan.mesh.whole_slice
    assert isinstance(whole, WholeSlice)
    mesh = replace(plan.mesh, whole_slice=replace(whole, route=route))
    assert one.kind in ("all-gather", "reduce-scatter")
    first = next(iter(whole.routes("two")), ONE)
    if route != first and not has_dims(one.axes, mesh.shape, replace(whole, route=route)):
        return []
    return [
        replace(
            one,
            axes=hop.axes,
            bytes_per_device=hop.elements_per_device,
            subgroup=hop.subgroup,
            beside=hop.beside,
            rearranged=hop.rearranged,
            compiled_as=hop.compiled_as,
        )
        for hop in collectives(one.kind, one.axes, one.bytes_per_device, mesh)
    ]


def _sent(plan: Plan, one: PlannedCollective) -> float:
    """Bytes that a device sends in all executions of a collective."""
    devices = plan.mesh.size(one.axes) if one.subgroup is None else one.subgroup.size
    passes = 2 if one.compiled_as else 1
    return passes * one.bytes_per_device * (devices - 1) / devices * one.count_per_step
