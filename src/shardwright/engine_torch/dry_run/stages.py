"""A dry run of a pipeline: each stage for two microbatches, from which the step of each rank follows.

A step of all microbatches would take hours for a large model. What a stage does is the same for each of them, but for the first forward
pass, which gathers what stays, and the last backward pass, which reduces what waits. So the second forward pass and the first backward pass
are those of every other microbatch. With one microbatch the bytes would be others: a stage has no gradients yet when its first backward
pass begins. Most stages have equal rows, and are run once. Ends that all stages share have three microbatches, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.core.schedules.actions import TOGETHER, Action, Kind, Table
from shardwright.core.stages.planned import Pipeline, PlannedStage
from shardwright.engine_torch.dry_run.counting import CountedCollective
from shardwright.engine_torch.dry_run.imagined import Imagined, imagined_model, imagined_step
from shardwright.engine_torch.io.mesh import Ranks, ranks_of
from shardwright.engine_torch.io.private import imagined_ranks
from shardwright.engine_torch.model.model import SHARED

BEFORE: tuple[Kind, ...] = ("receive", "forward", "send")
AFTER: tuple[Kind, ...] = ("receive_gradient", "backward", "input_gradient", "send_gradient", "weight_gradient")
"""What is done for a microbatch, in order: in the forward pass, and in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What the first device of a rank of the pipeline does and holds in a step, beside the plan's bytes. ``planned_even_bytes``: those with
    as many rows for every expert, if that is less."""

    rank: int
    units: tuple[str, ...]
    found: Imagined
    planned_bytes: int
    planned_even_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """One stage or neighbours of a rank, with ``num`` microbatches."""

    run: Imagined
    num: int

    @property
    def batch_bytes(self) -> int:
        """The rows of a microbatch."""
        return self.run.batch_bytes // self.num

    @property
    def other_bytes(self) -> int:
        """What it holds at its peak besides its state, its gradients, the batch and live microbatches."""
        stored = self.run.state_bytes + self.run.gradients_bytes + self.run.batch_bytes
        return max(0, self.run.peak_bytes - stored - self.num * self.run.saved_bytes)

    def collectives(self, microbatches: int) -> Iterator[tuple[CountedCollective, int]]:
        each = dict(self.run.of_microbatch)
        for what, count in self.run.collectives:
            yield what, count + each.get(what, 0) * (microbatches - self.num)


def run_ranks(plan: Plan, pipeline: Pipeline) -> tuple[RankRun, ...]:
    """The step of each rank of the pipeline, on the first of its devices."""
    known: dict[object, _Stages] = {}
    return tuple(_rank(plan, pipeline, rank, known) for rank in range(pipeline.choice.ranks))


def _rank(plan: Plan, pipeline: Pipeline, rank: int, known: dict[object, _Stages]) -> RankRun:
    num, live = plan.request.microbatches, pipeline.run.live[rank]
    own = _neighbours(pipeline.of_rank(rank))
    runs: list[_Stages] = []
    for stages in own:
        kinds = tuple(_kinds(pipeline.choice.table, rank, stage.number) for stage in stages)
        tables = [plan.stage_plans[stage.number].request.table for stage in stages]
        rows = tuple(tuple((weight.name, weight.num) for weight in table.weights) for table in tables)
        if (rows, kinds) not in known:
            known[rows, kinds] = _run(plan, pipeline, stages, kinds)
        runs.append(known[rows, kinds])
    shared = pipeline.shared
    if shared is not None:
        if "ends" not in known:
            known["ends"] = _run_ends(plan)
        runs.append(known["ends"])
    counted: dict[CountedCollective, int] = {}
    for run in runs:
        for what, count in run.collectives(num):
            counted[what] = counted.get(what, 0) + count
    alone = [run.run for run in runs]
    # Of a tied weight on two stages of the rank one is updated, and each was run alone.
    twice = [
        (own.optimizer_bytes - stage.optimizer_bytes, own.average_bytes - stage.average_bytes)
        for stage in pipeline.of_rank(rank)
        for own in (plan.stage_plans[stage.number].memory,)
    ]
    moments, averages = (sum(numbers) for numbers in zip(*twice, strict=True))
    batch = runs[0].batch_bytes * num
    stored = sum(one.state_bytes + one.gradients_bytes for one in alone) - moments - averages
    most_live = [max(live.get(stage.number, 0) for stage in stages) for stages in own]
    held = sum(run.run.saved_bytes * number for run, number in zip(runs, most_live, strict=False))
    # Gathered copies of all stages stay; of what else a pass needs, the largest.
    gathered = [sum(stage.gathered_bytes for stage in stages) for stages in own]
    gathered += [] if shared is None else [shared.gathered_bytes]
    kept = [min(number, run.other_bytes) for number, run in zip(gathered, runs, strict=True)]
    working = max(run.other_bytes - number for run, number in zip(runs, kept, strict=True))
    found = Imagined(
        collectives=tuple(counted.items()),
        weights_bytes=sum(one.weights_bytes for one in alone),
        gradients_bytes=sum(one.gradients_bytes for one in alone),
        moments_bytes=sum(one.moments_bytes for one in alone) - moments,
        average_bytes=sum(one.average_bytes for one in alone) - averages,
        batch_bytes=batch,
        peak_bytes=stored + batch + held + sum(kept) + working,
    )
    return RankRun(
        rank=rank,
        units=tuple(stage.stage.letters for stages in own for stage in stages),
        found=found,
        planned_bytes=pipeline.total_bytes(rank),
    )


def _neighbours(stages: Sequence[PlannedStage]) -> list[list[PlannedStage]]:
    """The stages of a rank, those together that pass on to each other, as the last rank's in a V: they are run together."""
    found: list[list[PlannedStage]] = []
    for stage in stages:
        if found and found[-1][-1].number + 1 == stage.number:
            found[-1].append(stage)
        else:
            found.append([stage])
    return found


def _kinds(table: Table, rank: int, number: int) -> tuple[Kind, ...]:
    """What the rank does for each microbatch of a stage. Where some backward passes are in halves and others are not, all are in halves
    here, which makes no difference."""
    kinds = {action.kind for action in table.actions[rank] if action.stage == number}
    if "input_gradient" in kinds:
        kinds.discard("backward")
    return tuple(kind for kind in (*BEFORE, *AFTER) if kind in kinds)


def _run(plan: Plan, pipeline: Pipeline, stages: Sequence[PlannedStage], kinds: Sequence[tuple[Kind, ...]]) -> _Stages:
    along = Mesh(tuple(axis for axis in plan.mesh.axes if axis.name in pipeline.axes))
    with imagined_ranks(plan.mesh.num_devices, plan.mesh.device(along.coordinates(stages[0].rank))):
        ranks = ranks_of(plan, torch.device("cpu"))
        return _Stages(run=_step(plan, ranks, stages, kinds), num=2)


def _run_ends(plan: Plan) -> _Stages:
    """The ends that all stages share, on the first rank."""
    with imagined_ranks(plan.mesh.num_devices):
        ranks = ranks_of(plan, torch.device("cpu"))
        return _Stages(run=_step_of_ends(plan, ranks), num=3)


def _step_of_ends(plan: Plan, ranks: Ranks, num: int = 3) -> Imagined:
    model = imagined_model(plan, ranks, only=[SHARED])
    ends = model.stages[SHARED]
    has = {"embed": ends.has_embedding, "logits": ends.has_logits, "embed_gradient": ends.has_embedding}
    actions = [Action(SHARED, kind, number) for number in range(num) for kind in TOGETHER if has[kind]]
    by_rank = [actions if rank == model.rank else () for rank in range(model.table.ranks)]
    model.table = replace(model.table, microbatches=num, actions=by_rank)
    second = [action for action in actions if action.microbatch == 1]
    return imagined_step(model, plan.request.batch * num // plan.request.microbatches, after=second)


def _step(
    plan: Plan, ranks: Ranks, stages: Sequence[PlannedStage], kinds: Sequence[tuple[Kind, ...]], num: int = 2
) -> Imagined:
    """A step of some stages alone."""
    numbers = [stage.number for stage in stages]
    model = imagined_model(plan, ranks, only=numbers)
    there = list(zip(numbers, kinds, strict=True))
    actions = [
        Action(number, kind, microbatch)
        for order, passes in ((there, BEFORE), (reversed(there), AFTER))
        for number, of_stage in order
        for microbatch in range(num)
        for kind in of_stage
        if kind in passes
    ]
    own = (*actions, *(Action(number, "reduce") for number in numbers))
    by_rank = [own if rank == stages[0].rank else () for rank in range(model.table.ranks)]
    model.table = replace(model.table, microbatches=num, actions=by_rank)
    before = [action for action in actions if action.kind in BEFORE and action.microbatch == num - 1]
    after = [action for action in actions if action.kind in AFTER and action.microbatch == 0]
    return imagined_step(model, plan.request.batch * num // plan.request.microbatches, before, after)
