"""A dry run of a pipeline: each stage for one and for two microbatches, from which the step of each rank follows.

A step of all microbatches would take hours for a large model. What a stage does is the same for each of them: so its collectives
in a step, and its bytes with any number of live microbatches, lie on the line through the two runs. Most stages have equal rows, and
are run once.
"""

from __future__ import annotations

from collections.abc import Iterator
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
class _Stage:
    """A stage with one microbatch, and with two."""

    one: Imagined
    two: Imagined

    @property
    def saved_bytes(self) -> int:
        """What it holds of a microbatch between its passes."""
        return max(0, self.two.peak_bytes - self.one.peak_bytes - (self.two.batch_bytes - self.one.batch_bytes))

    @property
    def other_bytes(self) -> int:
        """What it holds at its peak besides its state, its gradients, the batch and a microbatch."""
        stored = self.one.state_bytes + self.one.gradients_bytes + self.one.batch_bytes
        return max(0, self.one.peak_bytes - stored - self.saved_bytes)

    def collectives(self, microbatches: int) -> Iterator[tuple[CountedCollective, int]]:
        first, second = dict(self.one.collectives), dict(self.two.collectives)
        for what in dict.fromkeys((*first, *second)):
            one, two = first.get(what, 0), second.get(what, 0)
            yield what, one + (two - one) * (microbatches - 1)


def run_ranks(plan: Plan, pipeline: Pipeline) -> tuple[RankRun, ...]:
    """The step of each rank of the pipeline, on the first of its devices."""
    known: dict[object, _Stage] = {}
    return tuple(_rank(plan, pipeline, rank, known) for rank in range(pipeline.choice.ranks))


def _rank(plan: Plan, pipeline: Pipeline, rank: int, known: dict[object, _Stage]) -> RankRun:
    num, live = plan.request.microbatches, pipeline.run.live[rank]
    own = pipeline.of_rank(rank)
    stages: list[_Stage] = []
    for planned in own:
        kinds = _kinds(pipeline.choice.table, rank, planned.number)
        rows = tuple((weight.name, weight.num) for weight in plan.stage_plans[planned.number].request.table.weights)
        if (rows, kinds) not in known:
            known[rows, kinds] = _run(plan, pipeline, planned, kinds)
        stages.append(known[rows, kinds])
    counted: dict[CountedCollective, int] = {}
    for stage in stages:
        for what, count in stage.collectives(num):
            counted[what] = counted.get(what, 0) + count
    ones = [stage.one for stage in stages]
    batch = ones[0].batch_bytes * num
    stored = sum(one.state_bytes + one.gradients_bytes for one in ones)
    held = sum(stage.saved_bytes * live.get(of.number, 0) for of, stage in zip(own, stages, strict=True))
    # Gathered copies of all stages stay; of what else a pass needs, the largest.
    kept = [min(of.gathered_bytes, stage.other_bytes) for of, stage in zip(own, stages, strict=True)]
    working = max(stage.other_bytes - one for stage, one in zip(stages, kept, strict=True))
    found = Imagined(
        collectives=tuple(counted.items()),
        weights_bytes=sum(one.weights_bytes for one in ones),
        gradients_bytes=sum(one.gradients_bytes for one in ones),
        moments_bytes=sum(one.moments_bytes for one in ones),
        average_bytes=sum(one.average_bytes for one in ones),
        batch_bytes=batch,
        peak_bytes=stored + batch + held + sum(kept) + working,
    )
    return RankRun(
        rank=rank,
        units=tuple(of.stage.letters for of in own),
        found=found,
        planned_bytes=pipeline.total_bytes(rank),
    )


def _kinds(table: Table, rank: int, number: int) -> tuple[Kind, ...]:
    """What the rank does for each microbatch of a stage."""
    kinds = {action.kind for action in table.actions[rank] if action.stage == number}
    return tuple(kind for kind in (*BEFORE, *AFTER) if kind in kinds)


def _run(plan: Plan, pipeline: Pipeline, planned: PlannedStage, kinds: tuple[Kind, ...]) -> _Stage:
    along = Mesh(tuple(axis for axis in plan.mesh.axes if axis.name in pipeline.axes))
    with imagined_ranks(plan.mesh.num_devices, plan.mesh.device(along.coordinates(planned.rank))):
        ranks = ranks_of(plan, torch.device("cpu"))
        one, two = (_step(plan, ranks, planned, kinds, num) for num in (1, 2))
    return _Stage(one=one, two=two)


def _step(plan: Plan, ranks: Ranks, planned: PlannedStage, kinds: tuple[Kind, ...], num: int) -> Imagined:
    """A step of one stage alone, for so many microbatches."""
    model = Model(plan, ranks, weights_on=torch.device("meta"), how_many=evenly, only=planned.number)
    actions = [
        Action(planned.number, kind, microbatch)
        for passes in (BEFORE, AFTER)
        for microbatch in range(num)
        for kind in kinds
        if kind in passes
    ]
    own = (*actions, Action(planned.number, "reduce"))
    by_rank = [own if rank == planned.rank else () for rank in range(model.table.ranks)]
    model.table = replace(model.table, microbatches=num, actions=by_rank)
    return imagined_step(model, plan.request.batch * num // plan.request.microbatches)
