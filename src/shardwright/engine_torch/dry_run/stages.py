"""A dry run of a pipeline: each stage for two and for three microbatches, from which the step of each rank follows.

A step of all microbatches would take hours for a large model. What a stage does is the same for each of them: so its collectives
in a step, and its bytes with any number of live microbatches, lie on the line through the two runs. With one microbatch the bytes would be
others: a stage has no gradients yet when its first backward pass begins. Most stages have equal rows, and are run once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.core.schedules.actions import Action, Kind, Table
from shardwright.core.stages.planned import Pipeline, PlannedStage
from shardwright.engine_torch.dry_run.counting import CountedCollective
from shardwright.engine_torch.dry_run.imagined import Imagined, evenly, imagined_step
from shardwright.engine_torch.io.mesh import Ranks, ranks_of
from shardwright.engine_torch.io.private import imagined_ranks
from shardwright.engine_torch.model.model import Model

BEFORE: tuple[Kind, ...] = ("receive", "forward", "send")
AFTER: tuple[Kind, ...] = ("receive_gradient", "backward", "input_gradient", "send_gradient", "weight_gradient")
"""What is done for a microbatch, in order: in the forward pass, and in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRun:
    """What the first device of a rank of the pipeline does and holds in a step, beside the plan's bytes."""

    rank: int
    units: tuple[str, ...]
    found: Imagined
    planned_bytes: int

    def to_json(self) -> dict[str, object]:
        return {
            "rank": self.rank,
            "units": list(self.units),
            "peak_bytes": self.found.peak_bytes,
            "planned_bytes": self.planned_bytes,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stages:
    """One stage or neighbours of a rank, with two microbatches, and with three."""

    two: Imagined
    three: Imagined

    @property
    def saved_bytes(self) -> int:
        """What it holds of a microbatch between its passes."""
        return max(0, self.three.peak_bytes - self.two.peak_bytes - self.batch_bytes)

    @property
    def batch_bytes(self) -> int:
        """The rows of a microbatch."""
        return self.three.batch_bytes - self.two.batch_bytes

    @property
    def other_bytes(self) -> int:
        """What it holds at its peak besides its state, its gradients, the batch and live microbatches."""
        stored = self.two.state_bytes + self.two.gradients_bytes + self.two.batch_bytes
        return max(0, self.two.peak_bytes - stored - 2 * self.saved_bytes)

    def collectives(self, microbatches: int) -> Iterator[tuple[CountedCollective, int]]:
        first, second = dict(self.two.collectives), dict(self.three.collectives)
        for what in dict.fromkeys((*first, *second)):
            two, three = first.get(what, 0), second.get(what, 0)
            yield what, two + (three - two) * (microbatches - 2)


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
    counted: dict[CountedCollective, int] = {}
    for run in runs:
        for what, count in run.collectives(num):
            counted[what] = counted.get(what, 0) + count
    twos = [run.two for run in runs]
    batch = runs[0].batch_bytes * num
    stored = sum(one.state_bytes + one.gradients_bytes for one in twos)
    most_live = [max(live.get(stage.number, 0) for stage in stages) for stages in own]
    held = sum(run.saved_bytes * number for run, number in zip(runs, most_live, strict=True))
    # Gathered copies of all stages stay; of what else a pass needs, the largest.
    gathered = [sum(stage.gathered_bytes for stage in stages) for stages in own]
    kept = [min(number, run.other_bytes) for number, run in zip(gathered, runs, strict=True)]
    working = max(run.other_bytes - number for run, number in zip(runs, kept, strict=True))
    found = Imagined(
        collectives=tuple(counted.items()),
        weights_bytes=sum(one.weights_bytes for one in twos),
        gradients_bytes=sum(one.gradients_bytes for one in twos),
        moments_bytes=sum(one.moments_bytes for one in twos),
        average_bytes=sum(one.average_bytes for one in twos),
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
        two, three = (_step(plan, ranks, stages, kinds, num) for num in (2, 3))
    return _Stages(two=two, three=three)


def _step(
    plan: Plan, ranks: Ranks, stages: Sequence[PlannedStage], kinds: Sequence[tuple[Kind, ...]], num: int
) -> Imagined:
    """A step of some stages alone, for so many microbatches."""
    numbers = [stage.number for stage in stages]
    model = Model(plan, ranks, weights_on=torch.device("meta"), how_many=evenly, only=numbers)
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
    return imagined_step(model, plan.request.batch * num // plan.request.microbatches)
