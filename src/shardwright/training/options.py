"""The options of a training run beyond its plan, its progress, and its outcome."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from shardwright.core.findings.bounds import number_text, within
from shardwright.core.findings.errors import InputError
from shardwright.storage.url import Place
from shardwright.training.changes import CHANGEABLE, Change, may_not_change
from shardwright.training.cluster import Processes

METRICS_FILE = "metrics.jsonl"
"""The metrics file in a run's folder: one JSON object per step."""

SAVED_METRICS = ("loss", "grad_norm")
"""The metrics of a step that its checkpoint has."""

LEARNING_RATE, WEIGHT_DECAY, CLIP = 3e-4, 0.1, 1.0
"""Of a run that says nothing else: the highest learning rate, the decoupled decay of matrices, and the largest norm of the gradient."""

STDLIB = "stdlib"
"""The corpus that every machine has: the source text of Python's standard library."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The length, the data, the schedule, the checkpoints and the processes of a run.

    ``data``: a file, a folder, or ``stdlib``. ``tokenizer``: a ``tokenizer.json``; None: bytes. ``steps``: the length
    of the schedule, in steps; ``stop_after``: the step after which this run saves and ends; None: at ``steps``.
    ``lr``: the highest learning rate, reached after ``warmup`` steps. ``clip``: the largest global norm of the
    gradient. ``checkpoint_every``: in steps; None: at the end only. ``keep``: how many of the newest checkpoints are kept;
    ``keep_every``: the steps that are multiples of it; ``keep_every_hours``: the first of so many hours; ``keep_best``: so many
    with the lowest metric ``best_of``. What any of these keeps is kept; if all are None, every checkpoint.
    ``async_checkpoints``: they are written in the background, from a copy of the state in host memory.
    ``checkpoints``: the folder under which they are saved, or that of an object store; None: ``out``.
    ``weights``: a checkpoint whose weights a new run begins with; None: initial values of ``seed``. ``weights_new``: patterns of
    the weights that begin from initial values all the same; ``weights_skip``: of tensors there that are left out;
    ``weights_cast``: cast floating dtypes.
    ``resume``: go on from the newest checkpoint; ``resume_from``: from that of this step. ``change``: the names of options
    that may then differ from those of the checkpoint, of ``CHANGEABLE``.
    ``devices``: the requested number, over all processes; None: as many as the mesh has. ``processes``: this process and
    the others of the run; None: it is the only one. ``command``: the command line; ``arguments``: those of its arguments that
    type the run again. Both are only recorded; none: a program called.

    Raises InputError for invalid numbers.
    """

    steps: int
    out: Path
    data: str = STDLIB
    tokenizer: Path | None = None
    stop_after: int | None = None
    lr: float = LEARNING_RATE
    warmup: int = 0
    weight_decay: float = WEIGHT_DECAY
    clip: float = CLIP
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int | None = None
    keep_every: int | None = None
    keep_every_hours: int | None = None
    keep_best: int | None = None
    best_of: str | None = None
    async_checkpoints: bool = False
    checkpoints: Place | None = None
    weights: Place | None = None
    weights_new: Sequence[str] = ()
    weights_skip: Sequence[str] = ()
    weights_cast: bool = False
    resume: bool = False
    resume_from: int | None = None
    change: Sequence[str] = ()
    tensorboard: bool = False
    devices: int | None = None
    processes: Processes | None = None
    command: Sequence[str] = ()
    arguments: Sequence[str] = ()

    def __post_init__(self) -> None:
        counts = {
            "--steps": (self.steps, "steps"),
            "--stop-after": (self.stop_after, "steps"),
            "--checkpoint-every": (self.checkpoint_every, "steps"),
            "--keep": (self.keep, "checkpoints"),
            "--keep-every": (self.keep_every, "steps"),
            "--keep-every-hours": (self.keep_every_hours, "hours"),
            "--keep-best": (self.keep_best, "checkpoints"),
            "--resume-from": (self.resume_from, "steps"),
            "--devices": (self.devices, "devices"),
        }
        for option, (count, counted) in counts.items():
            if count is not None and count < 1:
                raise InputError(f"{option} is {number_text(count)}, and must be at least 1.")
            if count is not None:
                within(option, count, counted)
        if self.best_of is not None and self.keep_best is None:
            raise InputError("--best-of is for --keep-best. Give both, or neither.")
        if self.best_of not in (None, *SAVED_METRICS):
            raise InputError(f"--best-of is {self.best_of}, and must be one of {', '.join(SAVED_METRICS)}.")
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
        partly = {"new": self.weights_new, "skip": self.weights_skip, "cast": self.weights_cast}
        given = [f"--weights-{name}" for name, value in partly.items() if value]
        if given and self.weights is None and not (self.resume or self.resume_from is not None):
            raise InputError(f"{given[0]} is for --weights. Give both, or neither.")
        for name in self.change:
            if name not in CHANGEABLE:
                raise InputError(f"--change {','.join(self.change)}: {may_not_change(name)}")
        if self.change and not self.resume and self.resume_from is None:
            raise InputError("--change is for a run that goes on. Give --resume too, or leave it out.")
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
    def saved_under(self) -> Place:
        """The folder whose ``checkpoints`` the run saves in and resumes from."""
        return self.out if self.checkpoints is None else self.checkpoints

    @property
    def last_step(self) -> int:
        """The number of steps done when this run ends by itself."""
        return self.steps if self.stop_after is None else self.stop_after


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """How a run ended. ``step``: steps done, with those before a resume. ``loss``: of this run's last step, None if it did none.

    ``changes``: of its options, where it was resumed. ``step_s``: the median of this run's steps, without those that compile or settle;
    None if it has too few. ``measured_bytes``: the most that a device of the first process has held, where it says it.
    """

    ended: Literal["finished", "stopped", "interrupted"]
    step: int
    loss: float | None
    checkpoint: Place | None
    metrics: Path
    changes: Sequence[Change] = ()
    step_s: float | None = None
    measured_bytes: int | None = None

    def to_json(self) -> dict[str, object]:
        measured = {"step_s": self.step_s, "measured_bytes": self.measured_bytes}
        return {
            "ended": self.ended,
            "step": self.step,
            "loss": self.loss,
            "checkpoint": None if self.checkpoint is None else str(self.checkpoint),
            "metrics": str(self.metrics),
            "changes": [change.to_json() for change in self.changes],
            **{name: value for name, value in measured.items() if value is not None},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The record of one step, whose fields are those of ``metrics.jsonl`` (docs/metrics.md). ``step`` counts from 1; ``tokens`` are the
    valid ones of the global step, ``tokens_seen`` those of all steps until now.

    ``grad_norm``: the global norm of the gradients before clipping. ``lr``: the learning rate of this step. ``dropped``: token-expert
    assignments beyond the capacity of an expert, in all layers. ``peak_bytes``: the most that a device of the first process has held.
    ``time_s``: when the step ended, in seconds since 1970. Of a run's last step, where they are known: ``planned_step_s`` and
    ``planned_bytes`` of a device by the plan, and ``measured_bytes``, the most that a device has held.
    """

    step: int
    loss: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_s: float
    dropped: int = 0
    lr: float | None = None
    tokens_seen: int | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops_per_s_per_device: float | None = None
    mfu: float | None = None
    peak_bytes: int | None = None
    time_s: float | None = None
    planned_step_s: float | None = None
    planned_bytes: int | None = None
    measured_bytes: int | None = None


class Listener(Protocol):
    """Gets the progress of a run: a progress bar, lines in a log, or nothing shown."""

    def say(self, text: str) -> None:
        """Show a line that stays."""
        ...

    def doing(self, text: str) -> None:
        """Show what is under way before the steps begin."""
        ...

    def begin(self, first: int, last: int) -> None:
        """The steps begin: ``first`` are done already, the run ends at ``last``."""
        ...

    def step(self, record: StepRecord) -> None:
        """One more step is done."""
        ...

    def end(self, why: str, exit_code: int) -> None:
        """This process ends at once, because of another one. No further call follows."""
        ...


class Silent:
    """A listener that shows nothing, and keeps the lines that stay in ``messages``."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, text: str) -> None:
        self.messages.append(text)

    def doing(self, text: str) -> None:
        del text

    def begin(self, first: int, last: int) -> None:
        del first, last

    def step(self, record: StepRecord) -> None:
        del record

    def end(self, why: str, exit_code: int) -> None:
        del exit_code
        write_why(why)


def require_folder(out: Path) -> None:
    """Raises InputError where no files can be made in ``out``, which need not exist. Makes nothing."""
    there = next(path for path in (out, *out.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise InputError(f"--out {out}: {there} is not a folder. Give a folder, or a name that is free.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: {there} may not be written. Give a folder that may.")


def write_why(why: str) -> None:
    """Write to standard error why a process ends."""
    sys.stderr.write(f"shardwright: {why}\n")
    sys.stderr.flush()
