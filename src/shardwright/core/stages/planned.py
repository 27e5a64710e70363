"""A planned pipeline: what each stage has and needs, and what follows for each rank. Bytes are those of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.layout.wording import percent
from shardwright.core.schedules.actions import Action, Kind
from shardwright.core.schedules.clock import SENDS, Run, run
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.choice import Choice
from shardwright.core.stages.units import BACKWARD, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStage:
    """``saved_bytes``: what it holds of a microbatch between its forward and its backward pass. ``working_bytes``: what one pass
    needs besides; ``gathered_bytes``: what weights take that stay gathered. ``output_bytes``: what it sends of a microbatch. ``work``: the time of each computation of a microbatch, in
    ``unit`` of the pipeline."""

    number: int
    rank: int
    stage: Stage
    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int
    amax_history_bytes: int
    saved_bytes: int
    working_bytes: int
    output_bytes: int
    work: Mapping[Kind, float]
    gathered_bytes: int = 0
    narrowed_bytes: int = 0

    def to_json(self) -> dict[str, object]:
        return {
            "stage": self.number,
            "rank": self.rank,
            "units": self.stage.letters,
            "layers": [self.stage.layers.start, self.stage.layers.stop],
            "embedding": self.stage.embedding,
            "logits": self.stage.logits,
            "weights_bytes": self.weights_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "saved_bytes_per_microbatch": self.saved_bytes,
            "working_bytes": self.working_bytes,
            **({"gathered_bytes": self.gathered_bytes} if self.gathered_bytes else {}),
            "output_bytes": self.output_bytes,
            "work": dict(self.work),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEnds:
    """The ends that all stages share (``letters``: E, L), on each device. ``work``: as of a stage, of a microbatch, which all ranks compute
    together. ``working_bytes``: what it needs meanwhile; ``gathered_bytes``: what its weights take that stay gathered."""

    letters: str
    stored_bytes: int
    working_bytes: int
    gathered_bytes: int
    work: Mapping[Kind, float]

    @property
    def busy(self) -> float:
        """The work of one microbatch."""
        return self.work["forward"] + self.work["backward"]

    def to_json(self) -> dict[str, object]:
        return {
            "units": self.letters,
            "stored_bytes": self.stored_bytes,
            "working_bytes": self.working_bytes,
            **({"gathered_bytes": self.gathered_bytes} if self.gathered_bytes else {}),
            "work": dict(self.work),
        }


def work_of(units: Sequence[Unit]) -> Mapping[Kind, float]:
    """The flops of a token in each computation of some units."""
    forward = sum(unit.forward for unit in units)
    backward = sum(unit.step for unit in units) - forward
    weights = forward * BACKWARD / 2
    return {
        "forward": forward,
        "backward": backward,
        "input_gradient": backward - weights,
        "weight_gradient": weights,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """``axes``: those of role ``stage``. ``run``: the timetable on a clock, with the work of each stage. ``unit``: that of the stages' ``work``, ``flops`` of a token or ``seconds``. ``send_seconds``: the time
    of one transfer; None without chips. ``shared``: the ends that all stages share, which are not in ``run``."""

    axes: tuple[str, ...]
    choice: Choice
    stages: tuple[PlannedStage, ...]
    run: Run
    unit: str = "flops"
    send_seconds: float | None = None
    shared: SharedEnds | None = None

    @classmethod
    def of(
        cls,
        axes: tuple[str, ...],
        choice: Choice,
        stages: tuple[PlannedStage, ...],
        unit: str = "flops",
        send_seconds: float | None = None,
    ) -> Pipeline:
        """The pipeline with its timetable run on a clock."""

        def lasts(action: Action) -> float:
            if action.kind in SENDS:
                return send_seconds or 0.0
            return stages[action.stage].work.get(action.kind, 0.0)

        on_clock = run(choice.computations, lasts, lambda stage: stages[stage].saved_bytes)
        return cls(axes=axes, choice=choice, stages=stages, run=on_clock, unit=unit, send_seconds=send_seconds)

    def of_rank(self, rank: int) -> tuple[PlannedStage, ...]:
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def activations_bytes(self, rank: int) -> int:
        """The most that a rank's live microbatches hold at once, and what the larger of its stages' passes needs besides."""
        live = self.run.live[rank]
        held = sum(self.stages[stage].saved_bytes * number for stage, number in live.items())
        shared, kept = (0, 0) if self.shared is None else (self.shared.working_bytes, self.shared.gathered_bytes)
        gathered = kept + sum(stage.gathered_bytes for stage in self.of_rank(rank))
        return held + gathered + max(shared, *(stage.working_bytes for stage in self.of_rank(rank)))

    def total_bytes(self, rank: int) -> int:
        """All of a rank's memory."""
        stored = (
            stage.weights_bytes
            + stage.gradients_bytes
            + stage.optimizer_bytes
            + stage.average_bytes
            + stage.amax_history_bytes
            for stage in self.of_rank(rank)
        )
        shared = 0 if self.shared is None else self.shared.stored_bytes
        return sum(stored) + shared + self.activations_bytes(rank)

    @property
    def idle_share(self) -> float:
        """The share of a step in which ranks wait. Of shared ends no rank waits for another."""
        shared = 0.0 if self.shared is None else self.shared.busy * self.choice.microbatches
        return self.run.bubble * self.run.seconds / (self.run.seconds + shared) if self.run.seconds else 0.0

    @property
    def idle_text(self) -> str:
        """The share of a step in which ranks wait, as half a sentence of a finding."""
        return f"stages are idle for {percent(self.idle_share)} of the time, by their {self.unit}"

    @property
    def fullest(self) -> int:
        """The rank that needs the most memory, the first of equal ones."""
        return max(range(self.choice.ranks), key=lambda rank: (self.total_bytes(rank), -rank))

    @property
    def slowest(self) -> int:
        """The rank that computes the longest, the first of equal ones."""
        return max(range(self.choice.ranks), key=lambda rank: (self.run.busy[rank], -rank))

    def sends(self, rank: int) -> int:
        """Transfers that a rank sends in a step."""
        return sum(self.choice.computations.sends(rank, kind) for kind in SENDS)

    def to_json(self) -> dict[str, object]:
        choice = self.choice
        return {
            "axes": list(self.axes),
            "ranks": choice.ranks,
            "virtual": choice.virtual,
            "schedule": choice.schedule,
            "placement": choice.computations.placement,
            "stages_text": choice.text,
            "shared_out_by": choice.by,
            "unit": self.unit,
            "idle_share": self.idle_share,
            "send_seconds": self.send_seconds,
            "stages": [stage.to_json() for stage in self.stages],
            **({} if self.shared is None else {"shared_ends": self.shared.to_json()}),
            "ranks_memory": [
                {
                    "rank": rank,
                    "live_microbatches": self.run.most_live[rank],
                    "activations_bytes": self.activations_bytes(rank),
                    "total_bytes": self.total_bytes(rank),
                    "busy": self.run.busy[rank],
                    "sends": self.sends(rank),
                }
                for rank in range(choice.ranks)
            ],
            "fullest_rank": self.fullest,
            "slowest_rank": self.slowest,
        }
