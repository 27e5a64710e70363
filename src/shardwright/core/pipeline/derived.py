"""What follows from the plans of stages: the planned pipeline, the memory of a rank, and its collectives.

A stage's weights, specs, collectives and memory follow by the same rules as those of a model. What a pipeline adds is decided in
``core/stages``: which units a stage has; and in ``core/schedules``: when it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.names import STREAM
from shardwright.core.model.precision import in_use_dtype
from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.pipeline.ends import planned_ends
from shardwright.core.pipeline.program import names_of, program_collectives
from shardwright.core.pipeline.requests import stage_axes
from shardwright.core.pipeline.tied import tied_stages
from shardwright.core.plan.collectives import made_of_the_input
from shardwright.core.plan.fsdp_groups import trained, weight_of_layer
from shardwright.core.plan.memory import bytes_on_device, estimate_memory, microbatch_bytes
from shardwright.core.plan.plan import Memory, Phase, Plan, PlannedCollective, TensorPlan
from shardwright.core.plan.resharding import weight_reshardings, weight_update
from shardwright.core.quantization.quantized import QuantizedWeight
from shardwright.core.resolution.request import Request
from shardwright.core.schedules.actions import Kind
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.gathering import EACH_PASS, OF_SHARED_ENDS, Gathering, gathering_of
from shardwright.core.stages.planned import Pipeline, PlannedStage, work_of
from shardwright.core.stages.units import Letter, Unit


def planned_pipeline(
    request: Request, mesh: Mesh, choice: Choice, held: Sequence[Plan], ends: Plan | None = None
) -> Pipeline:
    """The pipeline with what each stage needs. ``held``: the plan of what its devices hold, for each stage. ``ends``: that of the ends
    that all stages share."""
    gathering = gathering_in(request, choice)
    # Most stages have the rows of another one.
    sizes = {id(plan.tensors): _Sizes.of(plan, gathering) for plan in {id(one.tensors): one for one in held}.values()}
    stages = [
        _planned(choice, number, units, plan, sizes[id(plan.tensors)])
        for number, (units, plan) in enumerate(zip(_units_by_stage(choice), held, strict=True))
    ]
    if not request.properties.one_program:
        stages = [_updated_once(stage, held, stages) for stage in stages]
    pipeline = Pipeline.of(stage_axes(request, mesh), choice, tuple(stages))
    return (
        pipeline
        if ends is None
        else replace(
            pipeline, shared=planned_ends(request, mesh, ends, gathered_bytes(ends, gathering_of_ends(request)))
        )
    )


def gathering_in(request: Request, choice: Choice) -> Gathering:
    """When the stages of a pipeline gather their weights."""
    if request.properties.gathers_by_schedule:
        return gathering_of(choice.schedule, request.remat)
    return Gathering(once=any(entry.keep_gathered for entry in request.layout.entries.values()))


def gathering_of_ends(request: Request) -> Gathering:
    """When the ends that all stages share gather their weights."""
    return OF_SHARED_ENDS if request.properties.gathers_by_schedule else EACH_PASS


class _Sizes(NamedTuple):
    """Bytes of a microbatch on a stage, between its passes, during one, and on the way to the next stage; and of weights that stay
    gathered."""

    saved: int
    working: int
    gathered: int
    output: int

    @classmethod
    def of(cls, plan: Plan, gathering: Gathering) -> _Sizes:
        output = plan.by_name[STREAM].bytes_per_device
        return cls(*microbatch_bytes(plan.request, plan.mesh, plan.tensors), gathered_bytes(plan, gathering), output)


def _planned(choice: Choice, number: int, units: Sequence[Unit], plan: Plan, sizes: _Sizes) -> PlannedStage:
    return PlannedStage(
        number=number,
        rank=choice.computations.rank_of(number),
        stage=choice.stages[number],
        weights_bytes=plan.memory.weights_bytes,
        gradients_bytes=plan.memory.gradients_bytes,
        optimizer_bytes=plan.memory.optimizer_bytes,
        average_bytes=plan.memory.average_bytes,
        amax_history_bytes=plan.memory.amax_history_bytes,
        narrowed_bytes=plan.memory.narrowed_bytes,
        saved_bytes=sizes.saved,
        working_bytes=sizes.working,
        gathered_bytes=sizes.gathered,
        output_bytes=sizes.output,
        work=work_of(units),
    )


def _updated_once(stage: PlannedStage, held: Sequence[Plan], stages: Sequence[PlannedStage]) -> PlannedStage:
    """A second stage of a rank with a tied weight, as in a V: it has a copy, which the first one updates."""
    for name, (first, last) in tied_stages(held).items():
        if stage.number == last and stages[first].rank == stage.rank:
            plan = held[last]
            own = estimate_memory(plan.request, plan.mesh, [row for row in plan.weights if row.name == name])
            stage = replace(
                stage,
                optimizer_bytes=stage.optimizer_bytes - own.optimizer_bytes,
                average_bytes=stage.average_bytes - own.average_bytes,
            )
    return stage


def gathered_bytes(plan: Plan, gathering: Gathering) -> int:
    """What weights of a stage take that stay gathered in a step, and their unsharded gradients where these are reduced at its end."""
    return sum(_gathered_bytes(plan, gathering))


def _gathered_bytes(plan: Plan, gathering: Gathering) -> Iterator[int]:
    for row in trained(plan.request, plan.weights):
        once = gathering.ends_once if row.stack is None else gathering.once
        if not plan.request.properties.gathers_by_schedule:
            yield from _kept_bytes(plan, row) if once else ()
            continue
        first = None if row.stack is None else plan.request.table.weight(row.name).first_in_stack
        one = weight_of_layer(plan.request, plan.mesh, row, first)
        if once and one.gathered and not one.of_codes:
            elements = row.num * one.shard_elements(plan.mesh) * plan.mesh.size(one.gathered)
            yield elements * DTYPE_BYTES[one.gather_dtype]
            if gathering.once:
                yield elements * DTYPE_BYTES[one.reduce_dtype]


def _kept_bytes(plan: Plan, row: TensorPlan) -> Iterator[int]:
    """A weight of layers that stays gathered on JAX, and the sum of its gradients in use."""
    weight = plan.request.table.weight(row.name)
    use = weight_reshardings(plan.request, plan.mesh, row)[weight.component]
    if use.kept:
        for dtype in (in_use_dtype(weight, plan.request.dtype), use.reduce_dtype):
            yield row.num * bytes_on_device(use.operand, row.shape, dtype, plan.mesh)


def _units_by_stage(choice: Choice) -> Sequence[Sequence[Unit]]:
    """The units of each stage, in the model's order."""
    found: list[list[Unit]] = [[] for _ in choice.stages]
    of_layer = {layer: number for number, stage in enumerate(choice.stages) for layer in stage.layers}
    ends: Mapping[Letter, Sequence[int]] = {
        "E": [number for number, stage in enumerate(choice.stages) if stage.embedding],
        "L": [number for number, stage in enumerate(choice.stages) if stage.logits],
    }
    for unit in choice.units:
        for number in ends[unit.letter] if unit.layer is None else [of_layer[unit.layer]]:
            found[number].append(unit)
    return found


def memory_of(pipeline: Pipeline, rank: int, ends: Plan | None = None) -> Memory:
    """The memory of a rank's device. ``ends``: the plan of the ends that all stages share."""
    stored = [*pipeline.of_rank(rank), *([] if ends is None else [ends.memory])]
    return Memory(
        weights_bytes=sum(one.weights_bytes for one in stored),
        gradients_bytes=sum(one.gradients_bytes for one in stored),
        optimizer_bytes=sum(one.optimizer_bytes for one in stored),
        average_bytes=sum(one.average_bytes for one in stored),
        amax_history_bytes=sum(one.amax_history_bytes for one in stored),
        narrowed_bytes=sum(one.narrowed_bytes for one in stored),
        activations_bytes=pipeline.activations_bytes(rank),
    )


def collectives_of(
    request: Request,
    mesh: Mesh,
    pipeline: Pipeline,
    plans: Sequence[Plan],
    weights: Sequence[TensorPlan],
    ends: Plan | None = None,
    program: Plan | None = None,
    quantized: Sequence[QuantizedWeight] = (),
) -> tuple[PlannedCollective, ...]:
    """The collectives of the slowest rank in a step: of each of its stages for each microbatch, once what is reduced over replicas; its
    transfers, which are permutes along the stage axes; and those of the ends that all stages share. On JAX those of one program
    (``program.py``). ``weights``, ``quantized``: of the model; ``program``: on JAX, a plan of what each device has of the program."""
    found: dict[tuple[object, ...], PlannedCollective] = {}
    rank = pipeline.slowest
    shared = [] if ends is None else [ends]
    if program is not None:
        own = names_of(ends)
        others = [row for row in weights if row.name not in own]
        low = [one for one in quantized if one.name not in own]
        of_rank = (
            *program_collectives(request, mesh, pipeline, plans, others, low, program),
            *_of_stages(request, shared, EACH_PASS),
        )
    else:
        stages = [plans[stage.number] for stage in pipeline.of_rank(rank)]
        of_rank = (
            *_of_stages(request, stages, gathering_in(request, pipeline.choice)),
            *_of_stages(request, shared, gathering_of_ends(request)),
            *_transfers(pipeline, rank),
            *_of_tied(pipeline, plans, rank),
        )
    for one in of_rank:
        key = (
            one.component,
            one.phase,
            one.kind,
            one.axes,
            one.bytes_per_device,
            one.tensors,
            one.ragged,
            one.subgroup,
            one.beside,
        )
        before = found.get(key)
        number = one.count_per_step + (before.count_per_step if before else 0)
        found[key] = replace(one, count_per_step=number)
    return tuple(found.values())


def _of_stages(request: Request, plans: Sequence[Plan], gathering: Gathering) -> Iterator[PlannedCollective]:
    for plan in plans:
        for one in _with_halves(plan) if gathering.split and request.remat == "full" else plan.collectives:
            times = _times_a_step(one, plan, gathering, request.microbatches)
            if times:
                yield replace(one, count_per_step=one.count_per_step * times)


def _with_halves(plan: Plan) -> Iterator[PlannedCollective]:
    """The collectives of a microbatch whose backward pass is in halves. The first one computes each layer again to its end: so also what a
    layer does last, which a backward pass in one piece does not need."""
    table = plan.request.table
    for one in plan.collectives:
        rows = [plan.by_name[name] for name in one.tensors if name in plan.by_name]
        in_layers = one.component not in OUTSIDE_LAYERS and any(row.kind == "activation" for row in rows)
        if not in_layers or all(made_of_the_input(table, row.name) for row in rows):
            yield one
        elif one.phase != "recompute":
            yield one
            if one.phase == "forward":
                yield replace(one, phase="recompute")


def share_of_microbatch(one: PlannedCollective, plan: Plan, gathering: Gathering, microbatches: int) -> float:
    """How often a collective of a stage's plan is executed for each of its executions in that plan, for one microbatch: less than once
    where it is executed once a step. An update is one of the step."""
    return 1.0 if one.phase == "update" else _times_a_step(one, plan, gathering, microbatches) / microbatches


def _times_a_step(one: PlannedCollective, plan: Plan, gathering: Gathering, microbatches: int) -> int:
    """How often a collective of one microbatch is in a step. Codes, which have a dtype of their own, are gathered for each pass."""
    if one.phase == "update":
        return 1
    rows = [plan.by_name[name] for name in one.tensors if name in plan.by_name]
    of_weights = bool(rows) and all(row.kind == "weight" for row in rows)
    if of_weights and one.kind == "all-gather" and one.dtype is None:
        once = gathering.ends_once if rows[0].stack is None else gathering.once
        return (0 if one.phase == "recompute" else 1) if once else microbatches
    if of_weights and one.kind == "reduce-scatter" and gathering.once:
        return 1
    return microbatches


def _of_tied(pipeline: Pipeline, plans: Sequence[Plan], rank: int) -> Iterator[PlannedCollective]:
    """The gradients of weights that stages of two ranks have: each sends its part to the other."""
    for name, stages in tied_stages(plans).items():
        ranks = [pipeline.stages[number].rank for number in stages]
        if rank in ranks and ranks[0] != ranks[1]:
            plan = plans[stages[ranks.index(rank)]]
            row = plan.by_name[name]
            held = weight_update(plan.request, plan.mesh, row).held
            yield PlannedCollective(
                component=row.component,
                phase="update",
                kind="permute",
                axes=pipeline.axes,
                bytes_per_device=bytes_on_device(held, row.shape, plan.request.summed_in, plan.mesh),
                count_per_step=1,
                tensors=(name,),
            )


def _transfers(pipeline: Pipeline, rank: int) -> Iterator[PlannedCollective]:
    sends: Mapping[Phase, Kind] = {"forward": "send", "backward": "send_gradient"}
    for phase, kind in sends.items():
        if number := pipeline.choice.computations.sends(rank, kind):
            yield PlannedCollective(
                component="residual",
                phase=phase,
                kind="permute",
                axes=pipeline.axes,
                bytes_per_device=pipeline.of_rank(rank)[0].output_bytes,
                count_per_step=number,
                tensors=(STREAM,),
            )
