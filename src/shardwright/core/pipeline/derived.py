"""What follows from the plans of stages: the planned pipeline, the memory of a rank, and its collectives.

A stage's weights, specs, collectives and memory follow by the same rules as those of a model. What a pipeline adds is decided in
``core/stages``: which units a stage has; and in ``core/schedules``: when it computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.pipeline.program import program_collectives
from shardwright.core.pipeline.requests import stage_axes
from shardwright.core.plan.memory import microbatch_bytes
from shardwright.core.plan.plan import Memory, Phase, Plan, PlannedCollective, TensorPlan
from shardwright.core.resolution.request import Request
from shardwright.core.schedules.actions import Kind
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.planned import Pipeline, PlannedStage
from shardwright.core.stages.units import BACKWARD, Letter


def planned_pipeline(request: Request, mesh: Mesh, choice: Choice, held: Sequence[Plan]) -> Pipeline:
    """The pipeline with what each stage needs. ``held``: the plan of what its devices hold, for each stage."""
    return Pipeline.of(
        stage_axes(request, mesh),
        choice,
        tuple(
            _planned(choice, number, stage, plan)
            for number, (stage, plan) in enumerate(zip(choice.stages, held, strict=True))
        ),
    )


def _planned(choice: Choice, number: int, stage: Stage, plan: Plan) -> PlannedStage:
    units = [unit for unit in choice.units if _has(stage, unit.letter, unit.layer)]
    forward = sum(unit.forward for unit in units)
    backward = sum(unit.step for unit in units) - forward
    weights = forward * BACKWARD / 2
    work: dict[Kind, float] = {
        "forward": forward,
        "backward": backward,
        "input_gradient": backward - weights,
        "weight_gradient": weights,
    }
    saved, working = microbatch_bytes(plan.request, plan.mesh, plan.tensors)
    return PlannedStage(
        number=number,
        rank=choice.table.rank_of(number),
        stage=stage,
        weights_bytes=plan.memory.weights_bytes,
        gradients_bytes=plan.memory.gradients_bytes,
        optimizer_bytes=plan.memory.optimizer_bytes,
        average_bytes=plan.memory.average_bytes,
        amax_history_bytes=plan.memory.amax_history_bytes,
        saved_bytes=saved,
        working_bytes=working,
        output_bytes=plan.by_name["residual.stream"].bytes_per_device,
        work=work,
    )


def _has(stage: Stage, letter: Letter, layer: int | None) -> bool:
    return {"E": stage.embedding, "t": layer is not None and layer in stage.layers, "L": stage.logits}[letter]


def memory_of(pipeline: Pipeline, rank: int) -> Memory:
    """The memory of a rank's device."""
    stages = pipeline.of_rank(rank)
    return Memory(
        weights_bytes=sum(stage.weights_bytes for stage in stages),
        gradients_bytes=sum(stage.gradients_bytes for stage in stages),
        optimizer_bytes=sum(stage.optimizer_bytes for stage in stages),
        average_bytes=sum(stage.average_bytes for stage in stages),
        amax_history_bytes=sum(stage.amax_history_bytes for stage in stages),
        activations_bytes=pipeline.activations_bytes(rank),
    )


def collectives_of(
    request: Request, mesh: Mesh, pipeline: Pipeline, plans: Sequence[Plan], weights: Sequence[TensorPlan]
) -> tuple[PlannedCollective, ...]:
    """The collectives of the slowest rank in a step: of each of its stages for each microbatch, once what is reduced over replicas; and
    its transfers, which are permutes along the stage axes. On JAX those of one program (``program.py``)."""
    found: dict[tuple[object, ...], PlannedCollective] = {}
    rank = pipeline.slowest
    if request.engine == "jax":
        of_rank = program_collectives(request, mesh, pipeline, plans, weights)
    else:
        of_rank = (*_of_stages(request, pipeline, plans, rank), *_transfers(pipeline, rank))
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
        )
        before = found.get(key)
        number = one.count_per_step + (before.count_per_step if before else 0)
        found[key] = replace(one, count_per_step=number)
    return tuple(found.values())


def _of_stages(request: Request, pipeline: Pipeline, plans: Sequence[Plan], rank: int) -> Iterator[PlannedCollective]:
    for stage in pipeline.of_rank(rank):
        for one in plans[stage.number].collectives:
            times = 1 if one.phase == "update" else request.microbatches
            yield replace(one, count_per_step=one.count_per_step * times)


def _transfers(pipeline: Pipeline, rank: int) -> Iterator[PlannedCollective]:
    kinds = [action.kind for action in pipeline.choice.table.actions[rank]]
    sends: Mapping[Phase, Kind] = {"forward": "send", "backward": "send_gradient"}
    for phase, kind in sends.items():
        if number := kinds.count(kind):
            yield PlannedCollective(
                component="residual",
                phase=phase,
                kind="permute",
                axes=pipeline.axes,
                bytes_per_device=pipeline.of_rank(rank)[0].output_bytes,
                count_per_step=number,
                tensors=("residual.stream",),
            )
