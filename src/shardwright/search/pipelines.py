"""What a pipeline takes at least, by the costs of its units alone: no stage is planned for it.

| bound | holds because |
|---|---|
| each rank computes its mean share of all units, and none waits | the slowest rank has at least the mean |
| a rank with the heaviest run of units, and before it once all stages that come before | the stages are those that a plan has with these costs; the first microbatch passes the stages before a rank, and its gradient passes them again |
| the same of any stages, one for each rank | of the ranks' shares those that end the soonest have ``fill`` |
| bytes: of each rank what its units store, what its live microbatches have saved, and the most that one of them needs besides | of one program all ranks have arrays of the largest stage, and both ends |
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import ceil

from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.pipeline.requests import chosen_stages
from shardwright.core.resolution.mesh_sizes import resolve_mesh
from shardwright.core.resolution.request import Request
from shardwright.core.schedules.actions import stages_of
from shardwright.core.schedules.clock import run
from shardwright.core.schedules.schedules import SCHEDULES
from shardwright.core.stages.choice import Choice, computations, own_schedule
from shardwright.core.stages.units import UnitCost, least_seconds
from shardwright.cost.hardware.machine import Machine
from shardwright.cost.stages import with_unit_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """A pipeline by the costs of its units: ``request`` has them. ``share``: seconds of a rank's mean share of all microbatches."""

    request: Request
    choice: Choice
    share: float

    @classmethod
    def of(cls, request: Request, machine: Machine) -> Pipelined | None:
        """None where the request has no stages on the machine, or no time."""
        try:
            return cls.with_costs(with_unit_costs(request, machine))
        except (FindingsError, InputError):
            return None

    @classmethod
    def with_costs(cls, request: Request) -> Pipelined | None:
        """Of a request that has its costs, as another schedule of the same microbatches."""
        if request.unit_costs is None:
            return None
        mesh, _ = resolve_mesh(request)
        choice = chosen_stages(request, mesh)
        if choice is None or choice.faults:
            return None
        seconds = request.microbatches * least_seconds(request.unit_costs) / choice.ranks
        return cls(request=request, choice=choice, share=seconds)

    @property
    def one_stage_each(self) -> float:
        """The least seconds where each rank has one stage, whichever."""
        return self.share * fill(self.choice.ranks, self.request.microbatches)

    @property
    def seconds(self) -> float:
        """The least with its own stages."""
        rules, number = SCHEDULES[self.choice.schedule], self.request.microbatches
        stages = [least_seconds(costs) for costs in self._by_stage()]
        # Of a backward pass in halves the gradients of weights hold nothing up.
        waits = rules.placement == "loop" and not rules.splits and self.choice.schedule != "looped-bfs"
        before = [0.0, *accumulate(stages)] if waits else [0.0] * len(stages)
        busy = [
            number * sum(stages[stage] for stage in self._stages_of(rank)) + before[rank]
            for rank in range(self.choice.ranks)
        ]
        return max(busy)

    def bytes_per_device(self, *, with_logits: bool) -> int:
        """The least that the fullest device has. ``with_logits``: with what the logits need meanwhile, of which more chunks of the loss need less."""
        costs, ranks = self.request.unit_costs or (), range(self.choice.ranks)
        ends = [cost for unit, cost in zip(self.choice.units, costs, strict=True) if unit.layer is None]
        shared = sum(cost.stored_bytes for cost in ends) if self._is_one_program else 0
        saved = [sum(cost.saved_bytes for cost in of_stage) for of_stage in self._by_stage()]
        stored, working = [0] * len(saved), [0] * len(saved)
        for number, (stage, of_stage) in enumerate(zip(self.choice.stages, self._by_stage(), strict=True)):
            layers = of_stage[stage.embedding : stage.embedding + len(stage.layers)]
            stored[number] = sum(cost.stored_bytes for cost in (layers if self._is_one_program else of_stage))
            needing = of_stage if with_logits or not stage.logits else of_stage[:-1]
            working[number] = max((cost.working_bytes for cost in needing), default=0)
        if self._is_one_program and self.choice.virtual == 1:
            saved, stored = [max(saved)] * len(saved), [max(stored)] * len(stored)
        if self.choice.virtual == 1:
            live = most_live(self.choice.schedule, self.choice.ranks, self.choice.microbatches)
            return shared + max(stored[rank] + working[rank] + saved[rank] * live[rank] for rank in ranks)
        held = run(self.choice.computations, held=lambda stage: saved[stage]).live
        return shared + max(
            sum(stored[stage] for stage in self._stages_of(rank))
            + max(working[stage] for stage in self._stages_of(rank))
            + sum(saved[stage] * number for stage, number in held[rank].items())
            for rank in ranks
        )

    def least_bytes_with(self, microbatches: int) -> float:
        """At least so many bytes its fullest device has with more microbatches, without what the logits need meanwhile, whatever its stages are
        then: rows are shared out to the microbatches, and one rank has at least its share of the layers."""
        costs, ranks, rows = self.request.unit_costs or (), self.choice.ranks, self.request.microbatches / microbatches
        of_units = [*zip(self.choice.units, costs, strict=True)]
        layers = [cost for unit, cost in of_units if unit.layer is not None]
        live = most_live(own_schedule(self.request.engine, ranks, 1, microbatches), ranks, microbatches)
        stored, saved = (sum(getattr(cost, name) for cost in layers) for name in ("stored_bytes", "saved_bytes"))
        if not self._is_one_program:
            least = min(cost.saved_bytes / max(1, cost.stored_bytes) for cost in layers) * rows
            return stored / sum(1 / (1 + number * least) for number in live)
        alike = len({(cost.stored_bytes, cost.saved_bytes) for cost in layers}) == 1
        share = ceil(len(layers) / ranks) / len(layers) if alike else 1 / ranks
        ends = sum(cost.stored_bytes for unit, cost in of_units if unit.layer is None)
        working = rows * max(cost.working_bytes for cost in layers)
        return ends + share * (stored + max(live) * rows * saved) + working

    @property
    def _is_one_program(self) -> bool:
        """One program runs on all ranks: its arrays are as large as those of the largest stage, and all have both ends."""
        return self.request.properties.one_program

    def _stages_of(self, rank: int) -> Sequence[int]:
        placement = SCHEDULES[self.choice.schedule].placement
        return stages_of(rank, self.choice.ranks, self.choice.virtual, placement)

    def _by_stage(self) -> Iterator[Sequence[UnitCost]]:
        """The costs of the units of each stage."""
        costs, first = self.request.unit_costs or (), 0
        for stage in self.choice.stages:
            number = len(stage.layers) + stage.embedding + stage.logits
            yield costs[first : first + number]
            first += number


@lru_cache(maxsize=4096)
def most_live(schedule: str, ranks: int, microbatches: int) -> Sequence[int]:
    """The most microbatches that each rank holds at once, of one stage each. It takes longer to make its table than all else of a bound."""
    return tuple(run(computations(schedule, ranks, 1, microbatches)).most_live)


def fill(ranks: int, microbatches: int) -> float:
    """How many times its mean share a pipeline takes at least that has one stage on each rank: a rank computes its own, and once all that comes before
    it, so of the shares w of ranks the end is at least microbatches * w + the sum of w before. It is the least where all ranks end at once.

    >>> fill(1, 4), round(fill(4, 4), 3), round(fill(4, 64), 3)
    (1.0, 1.463, 1.024)
    """
    rest = (1 - 1 / microbatches) ** ranks
    return ranks / microbatches / (1 - rest)
