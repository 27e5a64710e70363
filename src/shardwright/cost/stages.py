"""Which units each stage of a pipeline has on a machine: by their seconds, and within the memory of its chips.

A unit is priced as a stage of its own: the embedding, the logits, and one layer of each kind. A layer's passes and its bytes are then the
same on every stage. What is exposed of communication is the same too, since a stage's layers are alike component by component.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.pipeline.derived import gathered_bytes, gathering_in
from shardwright.core.pipeline.requests import chosen_stages, declared_stages, recipe_of, requests_of
from shardwright.core.plan.memory import microbatch_bytes
from shardwright.core.plan.moe_move import choose_moe_move
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import resolve
from shardwright.core.quantization.products import quantized_layers
from shardwright.core.resolution.mesh_sizes import resolve_mesh
from shardwright.core.resolution.request import Request
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.gathering import Gathering
from shardwright.core.stages.submodel import stage_table
from shardwright.core.stages.units import Unit, UnitCost
from shardwright.cost.hardware.links import MeshMapping, map_mesh
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.steps.pipeline import pass_costs


def with_unit_costs(request: Request, machine: Machine) -> Request:
    """The request with the seconds and bytes of its units, so that its first plan has the stages that ``assign_by_time`` gives. Unchanged
    where that gives none, and on other devices than the machine's. Raises FindingsError where there is no mesh."""
    has_stages = any("stage" in entry.roles.values() for entry in request.layout.entries.values())
    if machine.numbers is None or request.stages is not None or not has_stages:
        return request
    mesh, _ = resolve_mesh(request)
    layout, _ = choose_moe_move(request, mesh)
    moved = replace(request, layout=layout, unit_costs=None)
    choice = declared_stages(moved, mesh)
    if choice is None or choice.faults or mesh.num_devices != machine.num_devices:
        return request
    return replace(request, unit_costs=_costs(moved, mesh, choice, map_mesh(mesh, machine)))


def assign_by_time(plan: Plan, mapping: MeshMapping, plan_again: Callable[[Request], Plan]) -> Plan:
    """The plan with units shared out by seconds, planned again if that changes a stage. Unchanged where the user gave the stages, where a
    collective has no time, and where the request of the plan has the costs of its units already."""
    pipeline = plan.pipeline
    if pipeline is None or plan.request.stages is not None or plan.request.unit_costs is not None:
        return plan
    costs = _costs(plan.request, plan.mesh, pipeline.choice, mapping)
    if costs is None:
        return plan
    request = replace(plan.request, unit_costs=costs)
    choice = chosen_stages(request, plan.mesh)
    assert choice is not None
    if choice.stages != pipeline.choice.stages:
        return plan_again(request)
    return replace(plan, request=request, pipeline=replace(pipeline, choice=choice))


def _costs(request: Request, mesh: Mesh, choice: Choice, mapping: MeshMapping) -> tuple[UnitCost, ...] | None:
    """Of each unit; None if a collective has no time."""
    costs = tuple(_each_cost(request, mesh, choice, mapping))
    known = tuple(cost for cost in costs if cost is not None)
    return known if len(known) == len(costs) else None


def _each_cost(request: Request, mesh: Mesh, choice: Choice, mapping: MeshMapping) -> Iterator[UnitCost | None]:
    gathering = gathering_in(request, choice)
    kinds = [_kind(request, unit) for unit in choice.units]
    of_kinds = {kind: _alone(unit) for kind, unit in zip(reversed(kinds), reversed(choice.units), strict=True)}
    costs = {
        kind: _cost(resolve(own), mapping, gathering, request.microbatches)
        for kind, own in zip(of_kinds, requests_of(request, mesh, of_kinds.values()), strict=True)
    }
    return (costs[kind] for kind in kinds)


def _kind(request: Request, unit: Unit) -> Hashable:
    """What is the same of units that cost the same: layers with the same weights are alike, if as many of those are quantized."""
    table = stage_table(request.table, _alone(unit))
    recipe = recipe_of(request, table)
    if recipe is None:
        return tuple(table.weights_by_name)
    return tuple((weight.name, quantized_layers(weight, recipe, table)) for weight in table.weights)


def _alone(unit: Unit) -> Stage:
    layers = range(0) if unit.layer is None else range(unit.layer, unit.layer + 1)
    return Stage(layers=layers, embedding=unit.letter == "E", logits=unit.letter == "L")


def _cost(own: Plan, mapping: MeshMapping, gathering: Gathering, microbatches: int) -> UnitCost | None:
    """None if a collective has no time."""
    timed = pass_costs(own, mapping, gathering, microbatches)
    if timed is None:
        return None
    seconds, passes = timed
    saved, working = microbatch_bytes(own.request, own.mesh, own.tensors)
    memory = own.memory
    return UnitCost(
        seconds=seconds,
        stored_bytes=memory.state_bytes + memory.gradients_bytes + gathered_bytes(own, gathering),
        saved_bytes=saved,
        working_bytes=working,
        passes=passes,
    )
