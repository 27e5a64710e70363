"""The one program of all stages, as JAX runs them: its ticks, the layers that each rank has in its arrays, and its collectives.

| collective | how often in a step |
|---|---|
| of a stage's layers and ends | as the stage's own plan says, for each microbatch, on the ranks that have the stage |
| of what is made of the input alone, as masks | once for each microbatch, before the first tick |
| the permutes between stages | in every tick, also where a rank sends nothing |
| the sums of gradients of layers over replicas | once, of arrays that are equally large on all ranks |
| the sums of gradients of what is outside the layers | once, over the stages and the replicas: every rank has it, and one or two compute with it |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.collectives import made_of_the_input, sum_over_replicas
from shardwright.core.plan.plan import Phase, Plan, PlannedCollective, TensorPlan
from shardwright.core.resolution.gradients import Reduction
from shardwright.core.resolution.request import Request
from shardwright.core.schedules.ticks import Ticks, ticks_of
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.padded import PaddedStack, padded_stack
from shardwright.core.stages.planned import Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How often a rank takes a branch: ``taken`` times, of the ``turns`` in which the program reaches it."""

    taken: int
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRows:
    """A stack in the program. ``padded``: its rows in the arrays. ``first``: its first place among the layers of a stage. ``share``:
    of its layers' branches on the rank that computes the longest."""

    name: str
    padded: PaddedStack
    first: int
    share: Share

    def counts(self, ranks: int) -> Sequence[Sequence[int]]:
        """How many layers each rank has in each of its chunks."""
        virtual = len(self.padded.stages) // ranks
        return [[len(own) for own in self.padded.stages[rank * virtual :][:virtual]] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What an engine needs to run all stages in one program. ``axes``: those of the ranks, major first. ``layers``: places for a
    stage's layers, of all stacks. ``embedding``, ``logits``: of their branches on the rank that computes the longest."""

    axes: tuple[str, ...]
    ranks: int
    virtual: int
    ticks: Ticks
    stacks: tuple[StackRows, ...]
    layers: int
    embedding: Share
    logits: Share


def stage_program(plan: Plan) -> StageProgram | None:
    """The program of a plan for JAX; None without stages."""
    pipeline = plan.pipeline
    if pipeline is None or plan.request.engine != "jax":
        return None
    choice, microbatches = pipeline.choice, plan.request.microbatches
    ticks = ticks_of(choice.table)
    own = [stage.stage for stage in pipeline.of_rank(pipeline.slowest)]
    stacks: list[StackRows] = []
    places = 0
    for name, padded in padded_stacks(plan.request.table, choice).items():
        first = pipeline.slowest * choice.virtual
        taken = microbatches * sum(len(layers) for layers in padded.stages[first : first + choice.virtual])
        stacks.append(
            StackRows(name=name, padded=padded, first=places, share=Share(taken=taken, turns=len(ticks) * padded.most))
        )
        places += padded.most
    return StageProgram(
        axes=pipeline.axes,
        ranks=choice.ranks,
        virtual=choice.virtual,
        ticks=ticks,
        stacks=tuple(stacks),
        layers=places,
        embedding=Share(taken=microbatches * any(stage.embedding for stage in own), turns=len(ticks)),
        logits=Share(taken=microbatches * any(stage.logits for stage in own), turns=len(ticks)),
    )


def padded_stacks(table: ModelTable, choice: Choice) -> Mapping[str, PaddedStack]:
    """The arrays of each stack in the program, in the order of the layers."""
    stacked = {weight.stack: weight.first_layer for weight in table.weights if weight.stack is not None}
    return {
        name: padded_stack(table, name, choice.stages, choice.ranks, choice.table.placement)
        for name in sorted(stacked, key=lambda name: stacked[name])
    }


def with_sums_of_ends(request: Request, mesh: Mesh, tensors: Sequence[TensorPlan]) -> tuple[TensorPlan, ...]:
    """The tensors of a model in stages. On JAX every rank has the weights outside the layers, and those that compute with them have
    their gradients: they are summed over the stages."""
    axes = mesh.larger_than_one(request.layout.axes_with("stage", "residual"))

    def summed(row: TensorPlan) -> TensorPlan:
        if row.kind != "weight" or row.stack is not None or request.table.weight(row.name).frozen:
            return row
        # Where an end is shared by all stages, its role there says what is summed.
        own = [axis for axis in axes if request.layout.role(axis, row.component) in ("idle", "stage")]
        reductions: dict[str, Reduction] = {**row.gradient, **dict.fromkeys(own, "all-reduce")}
        return replace(row, gradient={axis: reductions[axis] for axis in mesh.names if axis in reductions})

    return tuple(map(summed, tensors)) if request.engine == "jax" else tuple(tensors)


def program_collectives(
    request: Request,
    mesh: Mesh,
    pipeline: Pipeline,
    plans: Sequence[Plan],
    weights: Sequence[TensorPlan],
) -> Iterator[PlannedCollective]:
    """The collectives of the program, on the rank that computes the longest. ``plans``: of the stages; ``weights``: of the model."""
    for place, stage in enumerate(pipeline.of_rank(pipeline.slowest)):
        for one in plans[stage.number].collectives:
            # Masks of a microbatch are those of all chunks.
            again = place and one.component not in OUTSIDE_LAYERS and _of_the_input(request, one)
            if one.phase != "update" and not again:
                yield replace(one, count_per_step=one.count_per_step * request.microbatches)
    padded = padded_stacks(request.table, pipeline.choice)
    for row in weights:
        rows = 1 if row.stack is None else padded[row.stack].rows // pipeline.choice.ranks
        yield from sum_over_replicas(request, mesh, row, rows)
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        yield PlannedCollective(
            component="residual",
            phase=phase,
            kind="permute",
            axes=pipeline.axes,
            bytes_per_device=pipeline.stages[0].output_bytes,
            count_per_step=len(ticks_of(pipeline.choice.table)),
            tensors=("residual.stream",),
        )


def _of_the_input(request: Request, one: PlannedCollective) -> bool:
    activations = {row.name for row in request.table.activations}
    return all(name in activations and made_of_the_input(request.table, name) for name in one.tensors)
