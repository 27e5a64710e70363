"""A training run: text in; metrics, checkpoints and a progress bar out; stopped and resumed exactly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from shardwright.checkpoint import Checkpoint, latest, set_aside_after
from shardwright.core.errors import InputError, ShardwrightError
from shardwright.core.plan import Plan
from shardwright.core.run import Listener, RunOptions, RunOutcome, Silent, StepRecord
from shardwright.engine_jax.feed import Source, batches, on_devices, open_source
from shardwright.engine_jax.journal import FILE_NAME, BoardWriter, Journal, board_writer, journal, require_folder
from shardwright.engine_jax.mesh import device_mesh
from shardwright.engine_jax.optimizer import OptimizerOptions
from shardwright.engine_jax.signals import Stop, stop_on_signal
from shardwright.engine_jax.snapshot import load_state, save_state
from shardwright.engine_jax.state import State, abstract_state, initial_state
from shardwright.engine_jax.step import Metrics, abstract_batch, batch_sharding, train_step
from shardwright.engine_jax.support import require_support

Arrays = State[jax.Array]
Step = Callable[[Arrays, Mapping[str, jax.Array]], tuple[Arrays, Metrics[jax.Array]]]


class RunError(ShardwrightError):
    """A run that had begun and cannot go on."""

    exit_code = 1


def train(options: RunOptions, plan: Plan, shown: Listener | None = None) -> RunOutcome:
    """Train as the plan says, from the start or from the newest checkpoint under ``options.out``.

    Raises InputError, before anything is allocated or written, for text that cannot be used, too few devices, a folder
    that holds another run, or a checkpoint that this run cannot continue; RunError for a loss that is not finite.
    """
    require_support(plan)
    require_folder(options.out)
    writer = board_writer() if options.tensorboard else None
    mesh = device_mesh(plan.mesh)
    shown = shown or Silent()
    shown.doing(f"reading {options.data}")
    source = open_source(options, plan)
    told = _told(options, plan, source)
    checkpoint = _checkpoint_to_resume(options, told, shown)
    shown.say(
        f"text: {source.corpus.num_tokens:,} tokens of {source.corpus.num_documents:,} documents "
        f"(tokenizer: {source.corpus.tokenizer}), {len(source.rows):,} rows of {plan.request.length:,}"
    )
    run = _Run(options=options, plan=plan, mesh=mesh, source=source, told=told, shown=shown, writer=writer)
    if checkpoint is None:
        shown.doing("making initial values")
        state, next_row = initial_state(plan, mesh, options.seed), 0
    else:
        shown.doing(f"reading {checkpoint.directory}")
        state, next_row = load_state(checkpoint, plan, mesh), checkpoint.point.data_position
        shown.say(f"resumed from {checkpoint.directory} (layout {checkpoint.point.layout_name})")
    return run.go(state, next_row, None if checkpoint is None else checkpoint.directory)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    options: RunOptions
    plan: Plan
    mesh: jax.sharding.Mesh
    source: Source
    told: Mapping[str, Any]
    shown: Listener
    writer: BoardWriter | None

    def go(self, state: Arrays, next_row: int, saved: Path | None) -> RunOutcome:
        first, last = int(state.step), self.options.last_step
        metrics_path = self.options.out / FILE_NAME
        if first >= last:
            self.shown.say(f"nothing to do: {first} steps are done, and this run ends at {last}")
            return RunOutcome(
                ended=self._ended(first, Stop()), step=first, loss=None, checkpoint=saved, metrics=metrics_path
            )
        with stop_on_signal() as stop:
            self.shown.doing("compiling the step")
            step = self._compiled()
            for aside in set_aside_after(self.options.out, first):
                self.shown.say(f"kept beside, not whole: {aside}")
            loss = math.nan
            with (
                journal(self.options.out, first_step=first, writer=self.writer) as records,
                batches(self.source, self.plan, self.options.seed, next_row) as ahead,
            ):
                self.shown.begin(first, last)
                sharding = batch_sharding(self.plan, self.mesh)
                for number in range(first + 1, last + 1):
                    started = time.perf_counter()
                    batch = next(ahead)
                    state, metrics = step(state, on_devices(batch, sharding))
                    loss = self._record(number, metrics, started, records)
                    # Asked once: a signal that came between two questions would end the run without saving it.
                    last = number if stop else last
                    if self._is_due(number) or number == last:
                        saved = self._save(state, batch.next_row)
                    if number == last:
                        break
            if stop and stop.signal is not None:
                self.shown.say(f"{stop.signal.name}: stopped after step {last}; saved in {saved}")
            return RunOutcome(
                ended=self._ended(last, stop), step=last, loss=loss, checkpoint=saved, metrics=metrics_path
            )

    def _compiled(self) -> Step:
        options = self.options
        optimizer = OptimizerOptions(
            lr=options.lr,
            warmup=options.warmup,
            steps=options.steps,
            weight_decay=options.weight_decay,
            clip=options.clip,
        )
        step = train_step(self.plan, self.mesh, optimizer)
        return step.lower(abstract_state(self.plan, self.mesh), abstract_batch(self.plan, self.mesh)).compile()

    def _record(self, number: int, metrics: Metrics[jax.Array], started: float, records: Journal) -> float:
        loss, grad_norm, tokens = (np.asarray(value).item() for value in metrics)
        step_s = time.perf_counter() - started
        record = StepRecord(
            step=number, loss=loss, grad_norm=grad_norm, tokens=tokens, tokens_per_s=tokens / step_s, step_s=step_s
        )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"step {number}: the loss is {loss} and the gradient's norm {grad_norm}, and both must be finite. "
                f"This step was not saved. Begin again with a lower --lr (now {self.options.lr:g}) or a longer --warmup "
                f"(now {self.options.warmup}), and another --out."
            )
        records.write(record)
        self.shown.step(record)
        return loss

    def _is_due(self, number: int) -> bool:
        every = self.options.checkpoint_every
        return every is not None and number % every == 0

    def _save(self, state: Arrays, next_row: int) -> Path:
        return save_state(
            self.options.out,
            state,
            self.plan,
            self.mesh,
            seed=self.options.seed,
            next_row=next_row,
            metadata=self.told,
            keep=self.options.keep,
        )

    def _ended(self, step: int, stop: Stop) -> Literal["finished", "stopped", "interrupted"]:
        if step >= self.options.steps:
            return "finished"
        return "interrupted" if stop else "stopped"


def _told(options: RunOptions, plan: Plan, source: Source) -> dict[str, Any]:
    """What must be the same for a run to go on as if it had not stopped, whatever its layout."""
    request = plan.request
    return {
        "model": request.table.name,
        "seed": options.seed,
        "steps": options.steps,
        "lr": options.lr,
        "warmup": options.warmup,
        "weight_decay": options.weight_decay,
        "clip": options.clip,
        "batch": request.batch,
        "length": request.length,
        "dtype": request.dtype,
        "weights_dtype": request.weights_dtype,
        "moments_dtype": request.moments_dtype,
        "tokenizer": source.corpus.tokenizer,
        "corpus": source.digest,
        **_described("architecture", asdict(request.table.architecture)),
    }


def _described(name: str, value: Any) -> dict[str, Any]:
    """A value that JSON can hold under one name, or the fields of a dict, theirs too, under its name and theirs."""
    if isinstance(value, dict):
        return {key: held for field in value for key, held in _described(f"{name}.{field}", value[field]).items()}
    return {name: json.loads(json.dumps(value))}


def _checkpoint_to_resume(options: RunOptions, told: Mapping[str, Any], shown: Listener) -> Checkpoint | None:
    """The newest whole checkpoint, if the run is to go on from one. Raises InputError where that cannot be."""
    found = latest(options.out)
    if not options.resume:
        if found.checkpoint is not None:
            raise InputError(
                f"{options.out} already holds a run. Give --resume to go on with it, or another --out for a new one."
            )
        if found.passed_over or (options.out / FILE_NAME).exists():
            raise InputError(
                f"{options.out} already holds a run, without a whole checkpoint to go on from. Give another --out."
            )
        return None
    if found.checkpoint is None:
        damaged = "".join(f"\n  {error}" for error in found.passed_over)
        raise InputError(
            f"--resume: there is no whole checkpoint under {options.out}. "
            f"Give the --out of the run to go on with, or leave --resume out.{damaged}"
        )
    for error in found.passed_over:
        shown.say(f"passed over a checkpoint that is not whole: {error}")
    before = found.checkpoint.point.metadata
    moved = [
        f"  {name}: was {before.get(name)!r}, is {value!r}"
        for name, value in told.items()
        if before.get(name) != value and name != "tokenizer"  # a path; what it made of the text is in "corpus"
    ]
    if moved:
        raise InputError(
            f"{found.checkpoint.directory} was saved by a run told otherwise; going on would be another run:\n"
            + "\n".join(moved)
            + "\nGive the same options, or another --out. The layout and the mesh may change."
        )
    return found.checkpoint
