"""What a training run is told beyond its plan, and what it says when it ends."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shardwright.core.findings.bounds import number_text, within
from shardwright.core.findings.errors import InputError
from shardwright.training.cluster import Processes

METRICS_FILE = "metrics.jsonl"
"""In a run's folder from its first step on: one object a step."""

STDLIB = "stdlib"
"""The name of the corpus that every machine has: the source text of Python's own standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How long, on what and from where to train.

    ``data``: a file, a folder, or ``stdlib``. ``tokenizer``: a ``tokenizer.json``; None: bytes. ``steps``: the length
    of the schedule, in steps; ``stop_after``: the step after which this run saves and ends; None: at ``steps``.
    ``lr``: the highest learning rate, reached after ``warmup`` steps. ``clip``: the largest global norm of the
    gradient. ``checkpoint_every``: in steps; None: at the end only. ``keep``: how many checkpoints stay; None: all.
    ``resume``: go on from the newest checkpoint; ``resume_from``: from that of this step.
    ``devices``: how many were asked for, in all processes; None: as many as the mesh has. ``processes``: this one and the
    others of the run; None: it is the only one.

    Raises InputError for numbers that cannot be.
    """

    steps: int
    out: Path
    data: str = STDLIB
    tokenizer: Path | None = None
    stop_after: int | None = None
    lr: float = 3e-4
    warmup: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int | None = None
    resume: bool = False
    resume_from: int | None = None
    tensorboard: bool = False
    devices: int | None = None
    processes: Processes | None = None

    def __post_init__(self) -> None:
        counts = {
            "--steps": (self.steps, "steps"),
            "--stop-after": (self.stop_after, "steps"),
            "--checkpoint-every": (self.checkpoint_every, "steps"),
            "--keep": (self.keep, "checkpoints"),
            "--resume-from": (self.resume_from, "steps"),
            "--devices": (self.devices, "devices"),
        }
        for option, (count, counted) in counts.items():
            if count is not None and count < 1:
                raise InputError(f"{option} is {number_text(count)}, and must be at least 1.")
            if count is not None:
                within(option, count, counted)
        for option, number in (("--lr", self.lr), ("--clip", self.clip)):
            if not 0 < number < float("inf"):
                raise InputError(f"{option} is {number:g}, and must be a number above 0.")
            within(option, number, "norm" if option == "--clip" else "rate")
        if not 0 <= self.weight_decay < float("inf"):
            raise InputError(f"--weight-decay is {self.weight_decay:g}, and must be a number of at least 0.")
        within("--weight-decay", self.weight_decay, "rate")
        if not 0 <= self.seed < 2**63:
            raise InputError(f"--seed is {number_text(self.seed)}, and must be from 0 to 2^63 - 1.")
        if not 0 <= self.warmup <= self.steps:
            raise InputError(
                f"--warmup is {number_text(self.warmup)}, and must be from 0 to --steps, which is {self.steps}: "
                f"the learning rate rises for --warmup steps and falls for the rest."
            )
        if self.devices is not None and self.processes is not None and self.devices % self.processes.count:
            raise InputError(
                f"--devices is {self.devices}, and must be a multiple of the number of processes, which is "
                f"{self.processes.count} ({self.processes.found}): each has as many."
            )
        if self.stop_after is not None and self.stop_after > self.steps:
            raise InputError(
                f"--stop-after is {self.stop_after}, and must not be above --steps, which is {self.steps}. "
                f"For a longer run, give a larger --steps."
            )

    @property
    def last_step(self) -> int:
        """The number of steps done when this run ends by itself."""
        return self.steps if self.stop_after is None else self.stop_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. ``step``: steps done since the first run. ``loss``: of the last of them, None when none was done."""

    ended: Literal["finished", "stopped", "interrupted"]
    step: int
    loss: float | None
    checkpoint: Path | None
    metrics: Path

    def to_json(self) -> dict[str, object]:
        return {
            "ended": self.ended,
            "step": self.step,
            "loss": self.loss,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "metrics": str(self.metrics),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What is known of one step. ``step`` counts from 1; ``tokens`` are the valid ones of the global step.

    ``grad_norm``: the global norm of the gradients before clipping. ``dropped``: choices of an expert, in all layers, that
    its capacity had no place for.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    dropped: int = 0


class Listener(Protocol):
    """Whom a run tells how it goes: a progress bar, lines in a log, nobody."""

    def say(self, text: str) -> None:
        """A line that stays."""
        ...

    def doing(self, text: str) -> None:
        """What is under way before the steps begin."""
        ...

    def begin(self, first: int, last: int) -> None:
        """The steps begin: ``first`` are done already, the run ends at ``last``."""
        ...

    def step(self, record: StepRecord) -> None:
        """One more step is done."""
        ...

    def end(self, why: str, exit_code: int) -> None:
        """This process ends here and now, because of another one: nothing more is told."""
        ...


class Silent:
    """A listener that tells nobody, and keeps in ``said`` the lines that stay."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def doing(self, text: str) -> None:
        del text

    def begin(self, first: int, last: int) -> None:
        del first, last

    def step(self, record: StepRecord) -> None:
        del record

    def end(self, why: str, exit_code: int) -> None:
        del exit_code
        write_why(why)


def write_why(why: str) -> None:
    """Why a process ends, on standard error."""
    sys.stderr.write(f"shardwright: {why}\n")
    sys.stderr.flush()
