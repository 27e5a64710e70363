"""From a request to a plan: resolve the mesh and every tensor, derive groups, reductions and collectives, and check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from shardwright.core.checks import check, check_mesh
from shardwright.core.engines.engines import Engine
from shardwright.core.findings.finding import worst_first
from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.capacity import ROOM_FOR_ALL
from shardwright.core.model.table import Activation, ModelTable, Owner, Weight, of_one_layer
from shardwright.core.pipeline.derived import collectives_of, memory_of, planned_pipeline
from shardwright.core.pipeline.ends import ends_request, with_sums
from shardwright.core.pipeline.program import with_amaxes_of_ends, with_sums_of_ends
from shardwright.core.pipeline.requests import chosen_stages, held_requests, stage_requests
from shardwright.core.plan.collectives import step_collectives
from shardwright.core.plan.memory import bytes_on_device, estimate_memory, narrowed_bytes
from shardwright.core.plan.moe_move import choose_moe_move
from shardwright.core.plan.plan import Memory, Plan, TensorPlan
from shardwright.core.policies.runs import check_policy
from shardwright.core.quantization.delayed import history_bytes
from shardwright.core.quantization.derivation import quantized_weights
from shardwright.core.quantization.products import quantized_layers
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.resolution.gradients import gradient_reductions
from shardwright.core.resolution.mesh_sizes import resolve_mesh
from shardwright.core.resolution.padding import PADDED_AXIS, padded_shape
from shardwright.core.resolution.request import Request
from shardwright.core.resolution.resolve import (
    activation_sizes,
    as_stored,
    resolve_activation,
    resolve_weight,
    traffic_of,
)
from shardwright.core.resolution.token_hops import may_overflow, rows_sent_on
from shardwright.core.resolution.update import resolve_update
from shardwright.core.stages.choice import Choice

NO_MEMORY = Memory(weights_bytes=0, gradients_bytes=0, optimizer_bytes=0, activations_bytes=0)


def _as_it_is(request: Request) -> Request:
    return request


def make_plan(request: Request, costed: Callable[[Request], Request] = _as_it_is) -> Plan:
    """The plan of a request, with every finding. A fix is planned and checked before it is printed.

    ``costed``: adds to a request what its units cost on a machine (``cost/stages.py``); also to that of each fix, in which they cost
    something else. Raises FindingsError where there can be no plan: the mesh sizes are not valid; InputError for a policy of recomputation
    with names or layers that the model does not have.
    """

    def tried(changed: Request) -> Plan:
        # Whether it is a fix does not depend on collectives, whose bytes take half of the time.
        return resolve(costed(changed), collectives=False)

    check_policy(request.table, request.remat)
    check_mesh(request, tried)
    plan = resolve(costed(request))
    return replace(plan, findings=plan.findings + worst_first((*request.besides, *check(plan, tried))))


def routed_evenly(plan: Plan) -> Plan:
    """The plan of the same step where every expert gets the same number of rows. Without a given size, PyTorch's buffers have as many rows
    as a rank receives, and a plan has more. The plan itself where that is no more."""
    request = plan.request
    if request.table.top_k is None or (request.expert_buffer is not None and request.expert_buffer <= 1):
        return plan
    even = with_room(plan, 1.0)
    return plan if even.memory == plan.memory else even


def with_room(plan: Plan, shares: float) -> Plan:
    """The plan of the same step, without findings, where a device has buffers for so many times its even share of experts' tokens."""
    stages = None if plan.pipeline is None else plan.pipeline.choice.text
    return resolve(replace(plan.request, expert_buffer=shares, stages=stages))


def with_all_to_one(plan: Plan) -> Plan:
    """The plan of the same step after its buffers have grown as far as they can: one device gets all tokens that its experts may. The plan
    itself where its buffers have a size that was asked for."""
    of_experts = plan.request.table.top_k is not None and plan.request.expert_buffer is None
    return with_room(plan, ROOM_FOR_ALL) if of_experts and may_overflow(plan.request, plan.mesh) else plan


def with_larger_buffers(plan: Plan) -> Plan:
    """The plan of the same step with twice the room for experts' tokens."""
    traffic = traffic_of(plan.request, plan.mesh)
    shares = traffic.buffer_rows(plan.request.expert_buffer) / traffic.assignments
    return with_room(plan, 2 * max(shares, plan.request.expert_buffer or shares))


def resolve(request: Request, *, collectives: bool = True) -> Plan:
    """The plan without the checks that need a complete plan. ``collectives``: with them."""
    mesh, notes = resolve_mesh(request)
    layout, choices = choose_moe_move(request, mesh)
    if layout is not request.layout:
        request = replace(request, layout=layout)
    tensors = tuple(_weight_plan(request, mesh, weight) for weight in request.table.weights)
    sizes = {**activation_sizes(request, mesh), **_padded_scores(request.table, tensors)}
    components = request.table.components
    quantized = quantized_weights(request, mesh)
    tensors = _resting(tensors, quantized, mesh)
    of_rows = rows_sent_on(request, mesh)
    tensors += tuple(
        _activation_plan(request, mesh, {**sizes, **of_rows.get(row.name, {})}, components, row)
        for row in request.table.activations
    )
    choice = chosen_stages(request, mesh)
    staged = choice is not None and not choice.faults
    plan = Plan(
        request=request,
        mesh=mesh,
        sizes=sizes,
        tensors=tensors,
        # In stages they are those of the slowest rank, and follow from the plans of stages.
        collectives=() if staged or not collectives else step_collectives(request, mesh, tensors, quantized),
        # In stages it is that of the fullest rank.
        memory=NO_MEMORY if staged else _memory(request, mesh, tensors, quantized),
        choices=choices,
        findings=notes,
        quantized=quantized,
    )
    return _with_stages(plan, choice, collectives=collectives) if choice is not None and staged else plan


def _memory(
    request: Request, mesh: Mesh, tensors: Sequence[TensorPlan], quantized: Sequence[QuantizedWeight]
) -> Memory:
    return replace(
        estimate_memory(request, mesh, tensors),
        amax_history_bytes=history_bytes(request, mesh, quantized),
        narrowed_bytes=narrowed_bytes(request, mesh, tensors, quantized),
    )


def _resting(tensors: Iterable[TensorPlan], quantized: Iterable[QuantizedWeight], mesh: Mesh) -> tuple[TensorPlan, ...]:
    """The weights with the bytes of codes and scales where they rest as these."""
    resting = {one.name: one.rest_bytes(mesh) for one in quantized if one.rests}
    return tuple(replace(row, bytes_per_device=resting[row.name]) if row.name in resting else row for row in tensors)


def _with_stages(plan: Plan, choice: Choice, *, collectives: bool) -> Plan:
    """The plan with its pipeline. ``choice``: its stages, which can be made."""
    request, mesh = plan.request, plan.mesh
    planned: dict[object, Plan] = {}
    plans = [_resolved_once(own, planned, collectives=collectives) for own in stage_requests(request, mesh, choice)]
    # Ranks with a program each hold their stages.
    held = (
        plans
        if not request.properties.one_program
        else [_resolved_once(own, planned, collectives=collectives) for own in held_requests(request, mesh, choice)]
    )
    of_ends = ends_request(request, mesh)
    ends = None if of_ends is None else with_sums(request, mesh, resolve(of_ends, collectives=collectives))
    program = held[0] if request.properties.one_program else None
    pipeline = planned_pipeline(request, mesh, choice, held, ends)
    tensors = with_sums_of_ends(request, mesh, plan.tensors, ends)
    weights = [row for row in tensors if row.kind == "weight"]
    quantized = with_amaxes_of_ends(request, mesh, plan.quantized, ends)
    return replace(
        plan,
        tensors=tensors,
        quantized=quantized,
        pipeline=pipeline,
        stage_plans=tuple(plans),
        ends_plan=ends,
        program=program,
        memory=memory_of(pipeline, pipeline.fullest, ends),
        collectives=collectives_of(request, mesh, pipeline, plans, weights, ends, program, quantized)
        if collectives
        else (),
    )


def _resolved_once(request: Request, planned: dict[object, Plan], *, collectives: bool) -> Plan:
    """The plan of a stage. Most have equal rows: only the numbers of their layers differ, on which no more depends than how many of them
    are quantized."""
    table, recipe = request.table, request.precision
    rows = tuple(
        (weight.name, weight.num, 0 if recipe is None else quantized_layers(weight, recipe, table))
        for weight in table.weights
    )
    if rows not in planned:
        planned[rows] = resolve(request, collectives=collectives)
    plan = planned[rows]
    return plan if plan.request is request else replace(plan, request=request)


def _weight_plan(request: Request, mesh: Mesh, weight: Weight) -> TensorPlan:
    stored = as_stored(request, weight)
    dtype = weight.dtype if weight.frozen else request.weights_dtype
    return _row_of_weight(weight, stored, dtype, request.table.owner, request.layout, mesh, request.engine)


@lru_cache(maxsize=4096)
def _row_of_weight(
    weight: Weight, stored: Weight, dtype: str, owner: Owner, layout: Layout, mesh: Mesh, engine: Engine
) -> TensorPlan:
    # All plans of a layout on a mesh have the same rows, and those of its stages have them but for the number of layers.
    of_layer = of_one_layer(weight)
    if of_layer is not weight:
        of_one = _row_of_weight(of_layer, of_one_layer(stored), dtype, owner, layout, mesh, engine)
        return _of_layers(of_one, weight.num)
    resolved = resolve_weight(stored, layout, mesh, engine)
    shape = padded_shape(stored, owner, layout, mesh, engine)
    shard_group = mesh.in_mesh_order(resolved.at_rest.axes)
    at_rest, in_use = resolved.at_rest, resolved.in_use
    in_update = resolve_update(stored, layout, mesh, engine, at_rest, in_use, shape)
    return TensorPlan(
        name=weight.name,
        kind="weight",
        component=weight.component,
        shape=shape,
        dtype=dtype,
        at_rest=at_rest,
        in_use=in_use,
        in_update=in_update,
        bytes_per_device=bytes_on_device(at_rest, shape, dtype, mesh),
        num=weight.num,
        shard_group=shard_group,
        replica_group=tuple(axis for axis in mesh.names if axis not in shard_group),
        gradient=gradient_reductions(stored, layout, in_update or at_rest, in_use),
        axis_requests=resolved.axis_requests,
        stack=weight.stack,
        unpadded=None if shape == stored.shape else stored.shape,
    )


def _padded_scores(table: ModelTable, weights: Sequence[TensorPlan]) -> dict[str, int]:
    """The size of the vocabulary in the logits: that of the weight that they are computed with."""
    logits = {w.name for w in table.weights if "logits" in (w.component, *w.uses)}
    padded = (row for row in weights if row.name in logits and row.unpadded is not None)
    return next(({PADDED_AXIS: row.shape[row.in_use.logical_axes.index(PADDED_AXIS)]} for row in padded), {})


def _activation_plan(
    request: Request, mesh: Mesh, sizes: Mapping[str, int], components: frozenset[str], row: Activation
) -> TensorPlan:
    own = {**sizes, **row.sizes} if row.sizes else sizes
    shape = tuple([own[name] for name in row.logical_axes])
    entries = request.table.sizes.get(PADDED_AXIS)
    dtype = row.dtype or request.dtype
    of_layer = _row_of_activation(
        row.name, row.component, row.logical_axes, shape, entries, dtype, request.layout, mesh, components
    )
    return _of_layers(of_layer, row.num)


@lru_cache(maxsize=16384)
def _of_layers(row: TensorPlan, num: int) -> TensorPlan:
    return replace(row, num=num)


@lru_cache(maxsize=8192)
def _row_of_activation(
    name: str,
    component: str,
    logical_axes: tuple[str, ...],
    shape: tuple[int, ...],
    entries: int | None,
    dtype: str,
    layout: Layout,
    mesh: Mesh,
    components: frozenset[str],
) -> TensorPlan:
    """Of one layer. ``entries``: of the vocabulary, without padding."""
    spec = resolve_activation(component, logical_axes, layout, mesh, components)
    unpadded = shape
    if entries and PADDED_AXIS in logical_axes:
        unpadded = tuple(entries if axis == PADDED_AXIS else n for axis, n in zip(logical_axes, shape, strict=True))
    group = mesh.in_mesh_order(spec.axes)
    return TensorPlan(
        name=name,
        kind="activation",
        component=component,
        shape=shape,
        dtype=dtype,
        at_rest=None,
        in_use=spec,
        bytes_per_device=bytes_on_device(spec, shape, dtype, mesh),
        num=1,
        shard_group=group,
        replica_group=tuple(axis for axis in mesh.names if axis not in group),
        unpadded=None if unpadded == shape else unpadded,
    )
