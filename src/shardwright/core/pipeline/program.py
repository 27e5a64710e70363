"""The one program of all stages, as JAX runs them: its ticks, the layers that each rank has in its arrays, and its collectives.

| collective | how often in a step |
|---|---|
| of a stage's layers and ends | as the stage's own plan says, for each microbatch, on the ranks that have the stage |
| of weights of layers that stay gathered (`keep_gathered`) | once a step for each row for a layer, on all ranks |
| of what is made of the input alone, as masks | once for each microbatch, before the first tick |
| the permutes between stages | in every tick, also where a rank sends nothing |
| the permutes of a ring of attention | in every tick, in each row for a layer and each pass, also where a rank sends nothing of use |
| the sums of gradients of layers over replicas | once, of arrays that are equally large on all ranks |
| delayed amaxes, over the devices that share a scale | once, of arrays that are equally large on all ranks; of the logits over the stages too |
| the sums of gradients of what is outside the layers | once, over the stages and the replicas: every rank has it, and one or two compute with it |
| of ends that all stages share | as their own plan says, for each microbatch, on all ranks together (``ends.py``) |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwright.core.layout.roles import OUTSIDE_LAYERS
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.names import STREAM
from shardwright.core.model.table import ModelTable
from shardwright.core.pipeline.ends import shared_ends
from shardwright.core.plan.collectives import amax_collectives, made_of_the_input, sum_over_replicas
from shardwright.core.plan.memory import kept_runs
from shardwright.core.plan.plan import Phase, Plan, PlannedCollective, TensorPlan
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.core.policies.runs import Run
from shardwright.core.quantization.products import layer_runs
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.resolution.gradients import Reduction
from shardwright.core.resolution.request import Request
from shardwright.core.schedules.ticks import Ticks, ticks_in, ticks_of
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.padded import PaddedStack, padded_stack
from shardwright.core.stages.planned import Pipeline
from shardwright.core.stages.units import Letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """How often a rank takes a branch: ``taken`` times, of the ``turns`` in which the program reaches it."""

    taken: int
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """Layers of a stack that are computed alike, by their numbers in it: ``quantized`` are the weights that a recipe quantizes there.
    ``share``: of their branches on the rank that computes the longest."""

    layers: range
    quantized: frozenset[str]
    share: Share


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRows:
    """A stack in the program. ``padded``: its rows in the arrays. ``first``: its first place among the layers of a stage. ``kept``: what each
    of its layers keeps of a live microbatch, and makes again."""

    name: str
    padded: PaddedStack
    first: int
    runs: tuple[LayerRun, ...]
    kept: Run

    def counts(self, ranks: int) -> Sequence[Sequence[int]]:
        """How many layers each rank has in each of its chunks."""
        virtual = len(self.padded.stages) // ranks
        return [[len(own) for own in self.padded.stages[rank * virtual :][:virtual]] for rank in range(ranks)]

    def firsts(self, ranks: int) -> Sequence[Sequence[int]]:
        """The number in the stack of the first layer of each rank's chunks."""
        virtual = len(self.padded.stages) // ranks
        return [[own.start for own in self.padded.stages[rank * virtual :][:virtual]] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProgram:
    """What an engine needs to run all stages in one program. ``axes``: those of the ranks, major first. ``layers``: places for a
    stage's layers, of all stacks. ``embedding``, ``logits``: of their branches on the rank that computes the longest. ``shared``: the
    ends that all stages share."""

    axes: tuple[str, ...]
    ranks: int
    virtual: int
    ticks: Ticks
    stacks: tuple[StackRows, ...]
    layers: int
    embedding: Share
    logits: Share
    shared: tuple[Letter, ...]

    def place_of(self, end: Letter) -> tuple[int, int]:
        """The rank, and its chunk, of the first stage or of the last one."""
        return (0, 0) if end == "E" else (self.ranks - 1, self.virtual - 1)


def stage_program(plan: Plan) -> StageProgram | None:
    """The program of all stages; None without stages, and where each rank has a program of its own."""
    pipeline = plan.pipeline
    if pipeline is None or not plan.request.properties.one_program:
        return None
    choice, microbatches = pipeline.choice, plan.request.microbatches
    ticks = ticks_of(choice.computations)
    own = [stage.stage for stage in pipeline.of_rank(pipeline.slowest)]
    shared = shared_ends(plan.request, plan.mesh)
    stacks: list[StackRows] = []
    places = 0
    assert plan.program is not None
    kept = {run.stack: run for run in kept_runs(plan.program.request, plan.program.mesh, plan.program.tensors)}
    for name, padded in padded_stacks(plan.request.table, choice).items():
        first = pipeline.slowest * choice.virtual
        of_slowest = padded.stages[first : first + choice.virtual]
        stacks.append(
            StackRows(
                name=name,
                padded=padded,
                first=places,
                runs=tuple(_runs(plan, name, of_slowest, len(ticks) * padded.most)),
                kept=kept[name],
            )
        )
        places += padded.most
    return StageProgram(
        axes=pipeline.axes,
        ranks=choice.ranks,
        virtual=choice.virtual,
        ticks=ticks,
        stacks=tuple(stacks),
        layers=places,
        embedding=Share(
            taken=microbatches * ("E" in shared or any(stage.embedding for stage in own)), turns=len(ticks)
        ),
        logits=Share(taken=microbatches * ("L" in shared or any(stage.logits for stage in own)), turns=len(ticks)),
        shared=shared,
    )


def _runs(plan: Plan, stack: str, of_slowest: Sequence[range], turns: int) -> Iterator[LayerRun]:
    """``of_slowest``: the layers of the stack on the rank that computes the longest, of each of its stages."""
    num = next(weight.num for weight in plan.request.table.weights if weight.stack == stack)
    layers_of = {one.name: one.num for one in plan.quantized if one.stack == stack}
    for run in layer_runs(num, layers_of.values()):
        own = sum(len(range(max(run.start, one.start), min(run.stop, one.stop))) for one in of_slowest)
        yield LayerRun(
            layers=run,
            quantized=frozenset(name for name, layers in layers_of.items() if layers > run.start),
            share=Share(taken=plan.request.microbatches * own, turns=turns),
        )


def padded_stacks(table: ModelTable, choice: Choice) -> Mapping[str, PaddedStack]:
    """The arrays of each stack in the program, in the order of the layers."""
    stacked = {weight.stack: weight.first_layer for weight in table.weights if weight.stack is not None}
    return {
        name: padded_stack(table, name, choice.stages, choice.ranks, choice.computations.placement)
        for name in sorted(stacked, key=lambda name: stacked[name])
    }


def with_sums_of_ends(
    request: Request, mesh: Mesh, tensors: Sequence[TensorPlan], ends: Plan | None
) -> tuple[TensorPlan, ...]:
    """The tensors of a model in stages. On JAX every rank has the weights outside the layers, and those that compute with them have
    their gradients: they are summed over the stages. ``ends``: the plan of the ends that all stages share, which compute them together: what
    is summed of these follows from their roles."""
    axes = mesh.larger_than_one(request.layout.axes_with("stage", "residual"))
    shared = names_of(ends)

    def summed(row: TensorPlan) -> TensorPlan:
        frozen = row.kind == "weight" and request.table.weight(row.name).frozen
        if row.kind != "weight" or row.stack is not None or frozen or row.name in shared:
            return row
        reductions: dict[str, Reduction] = {**row.gradient, **dict.fromkeys(axes, "all-reduce")}
        return replace(row, gradient={axis: reductions[axis] for axis in mesh.names if axis in reductions})

    return tuple(map(summed, tensors)) if request.properties.one_program else tuple(tensors)


def names_of(ends: Plan | None) -> frozenset[str]:
    """The weights of the ends that all stages share."""
    return frozenset() if ends is None else frozenset(row.name for row in ends.weights)


def with_amaxes_of_ends(
    request: Request, mesh: Mesh, quantized: Sequence[QuantizedWeight], ends: Plan | None
) -> tuple[QuantizedWeight, ...]:
    """The quantized weights of a model in stages. On JAX every rank has what a run keeps of the logits' product, and one computes it:
    its delayed amaxes are reduced over the stages too. ``ends``: as above."""
    axes, shared = mesh.larger_than_one(request.layout.axes_with("stage", "residual")), names_of(ends)

    def reduced(operand: QuantizedOperand) -> QuantizedOperand:
        if operand.quantizer.amax != "delayed":
            return operand
        values = max(operand.values, operand.experts)
        return replace(operand, reduced=mesh.in_mesh_order((*axes, *operand.reduced)), values=values)

    return (
        tuple(
            one
            if one.stack is not None or one.name in shared
            else replace(one, operands=tuple(map(reduced, one.operands)))
            for one in quantized
        )
        if request.properties.one_program
        else tuple(quantized)
    )


def program_collectives(
    request: Request,
    mesh: Mesh,
    pipeline: Pipeline,
    plans: Sequence[Plan],
    weights: Sequence[TensorPlan],
    quantized: Sequence[QuantizedWeight],
    program: Plan,
) -> Iterator[PlannedCollective]:
    """The collectives of the program, on the rank that computes the longest. ``plans``: of the stages; ``weights``, ``quantized``: of
    the model; ``program``: of what each device has of it."""
    ticks = ticks_in(pipeline.choice.ranks, pipeline.choice.virtual, pipeline.choice.microbatches)
    for place, stage in enumerate(pipeline.of_rank(pipeline.slowest)):
        for one in plans[stage.number].collectives:
            # Masks of a microbatch are those of all chunks.
            again = place and one.component not in OUTSIDE_LAYERS and _of_the_input(request, one)
            if (
                one.phase != "update"
                and one.kind != "permute"
                and not again
                and not _once_a_step(plans[stage.number], one)
            ):
                yield replace(one, count_per_step=one.count_per_step * request.microbatches)
    for one in program.collectives:
        if one.kind == "permute":
            yield replace(one, count_per_step=one.count_per_step * ticks)
        elif _once_a_step(program, one):
            yield replace(one, count_per_step=one.count_per_step * pipeline.choice.virtual)
    padded = padded_stacks(request.table, pipeline.choice)
    for row in weights:
        rows = 1 if row.stack is None else padded[row.stack].rows // pipeline.choice.ranks
        yield from sum_over_replicas(request, mesh, row, rows)
    of_rows = [one if one.stack is None else replace(one, num=padded[one.stack].rows) for one in quantized]
    yield from (one for one in amax_collectives(request, mesh, of_rows) if one.phase == "update")
    phases: tuple[Phase, ...] = ("forward", "backward")
    for phase in phases:
        yield PlannedCollective(
            component="residual",
            phase=phase,
            kind="permute",
            axes=pipeline.axes,
            bytes_per_device=pipeline.stages[0].output_bytes,
            count_per_step=ticks,
            tensors=(STREAM,),
        )


def _once_a_step(plan: Plan, one: PlannedCollective) -> bool:
    """Whether a collective is that of a weight that stays gathered."""
    if one.phase == "update" or one.kind not in ("all-gather", "reduce-scatter"):
        return False
    rows = [plan.by_name[name] for name in one.tensors]
    return all(
        row.kind == "weight" and any(use.kept for use in weight_reshardings(plan.request, plan.mesh, row).values())
        for row in rows
    )


def _of_the_input(request: Request, one: PlannedCollective) -> bool:
    activations = {row.name for row in request.table.activations}
    return all(name in activations and made_of_the_input(request.table, name) for name in one.tensors)
