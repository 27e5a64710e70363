"""A training run: text in; metrics, checkpoints and a progress bar out; stopped and resumed exactly."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from shardwright.checkpoint import Checkpoint, latest, set_aside_after
from shardwright.core.errors import InputError, ShardwrightError
from shardwright.core.plan import Plan
from shardwright.core.run import Listener, RunOptions, RunOutcome, Silent, StepRecord
from shardwright.engine_jax.feed import Source, batches, feed_of, open_source
from shardwright.engine_jax.group import Ending, Group, must_agree
from shardwright.engine_jax.journal import FILE_NAME, BoardWriter, Journal, board_writer, journal, require_folder
from shardwright.engine_jax.mesh import device_mesh
from shardwright.engine_jax.optimizer import OptimizerOptions
from shardwright.engine_jax.processes import joined
from shardwright.engine_jax.signals import stop_on_signal
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

    Where it is one of several processes, it meets the others first; only process 0 tells ``shown`` and writes metrics.

    Raises InputError, before anything is allocated or written, for text that cannot be used, too few devices, a folder
    that holds another run, a checkpoint that this run cannot continue, or processes that were not told the same; RunError
    for a loss that is not finite.
    """
    processes = options.processes
    if shown is None or (processes is not None and processes.index != 0):
        shown = Silent()
    if processes is not None:
        shown.say(f"{processes.count} processes meet at {processes.coordinator} ({processes.found})")
        shown.doing("waiting for the others")
    with joined(processes) as group:
        return _train(options, plan, shown, group)


def _train(options: RunOptions, plan: Plan, shown: Listener, group: Group) -> RunOutcome:
    require_support(plan)
    require_folder(options.out)
    writer = board_writer() if options.tensorboard else None
    mesh = device_mesh(plan.mesh)
    shown.doing(f"reading {options.data}")
    source = open_source(options, plan)
    told = _told(options, plan, source)
    checkpoint = _checkpoint_to_resume(options, told, shown)
    must_agree(group, {**told, **_told_to_all(options, plan, checkpoint)}, "before the first step")
    shown.say(
        f"text: {source.corpus.num_tokens:,} tokens of {source.corpus.num_documents:,} documents "
        f"(tokenizer: {source.corpus.tokenizer}), {len(source.rows):,} rows of {plan.request.length:,}"
    )
    run = _Run(options=options, plan=plan, mesh=mesh, source=source, told=told, shown=shown, writer=writer, group=group)
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
    group: Group

    def go(self, state: Arrays, next_row: int, saved: Path | None) -> RunOutcome:
        first, last = int(state.step), self.options.last_step
        metrics_path = self.options.out / FILE_NAME
        if first >= last:
            self.shown.say(f"nothing to do: {first} steps are done, and this run ends at {last}")
            return RunOutcome(
                ended=self._ended(first, None), step=first, loss=None, checkpoint=saved, metrics=metrics_path
            )
        with stop_on_signal() as stop:
            self.shown.doing("compiling the step")
            step = self._compiled()
            loss, ending = math.nan, Ending(last)
            feed = feed_of(self.plan, batch_sharding(self.plan, self.mesh))
            with (
                self._journal(first) as records,
                batches(self.source, self.plan, feed, self.options.seed, next_row) as ahead,
            ):
                self.shown.begin(first, last)
                for number in range(first + 1, last + 1):
                    started = time.perf_counter()
                    batch = next(ahead)
                    state, metrics = step(state, feed.on_devices(batch))
                    loss = self._record(number, metrics, started, records)
                    # Asked once: a signal that came between two questions would end the run without saving it.
                    ending = self.group.stop_after(number, last, stop.signal.name if stop.signal is not None else None)
                    if self._is_due(number) or number == ending.last:
                        saved = self._save(state, batch.next_row)
                    if number == ending.last:
                        break
            if ending.why is not None:
                self.shown.say(f"{ending.why}: stopped after step {ending.last}; saved in {saved}")
            return RunOutcome(
                ended=self._ended(ending.last, ending.why),
                step=ending.last,
                loss=loss,
                checkpoint=saved,
                metrics=metrics_path,
            )

    def _journal(self, first: int) -> AbstractContextManager[Journal | None]:
        """The journal, and what the run passed over set aside: by process 0 alone."""
        if self.group.index != 0:
            return nullcontext()
        for aside in set_aside_after(self.options.out, first):
            self.shown.say(f"kept beside, not whole: {aside}")
        return journal(self.options.out, first_step=first, writer=self.writer)

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

    def _record(self, number: int, metrics: Metrics[jax.Array], started: float, records: Journal | None) -> float:
        loss, grad_norm, tokens, dropped, overflow = (np.asarray(value).item() for value in metrics)
        step_s = time.perf_counter() - started
        record = StepRecord(
            step=number,
            loss=loss,
            grad_norm=grad_norm,
            tokens=tokens,
            dropped=dropped,
            tokens_per_s=tokens / step_s,
            step_s=step_s,
        )
        if overflow:
            raise RunError(
                f"step {number}: {overflow:,} choices of an expert found no room where its device keeps what comes to it, "
                f"so this step was not the model's. It was not saved. Go on with --resume from the newest checkpoint, with "
                f"a larger --expert-buffer (now {self.plan.request.expert_buffer}) or without it."
            )
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise RunError(
                f"step {number}: the loss is {loss} and the gradient's norm {grad_norm}, and both must be finite. "
                f"This step was not saved. Begin again with a lower --lr (now {self.options.lr:g}) or a longer --warmup "
                f"(now {self.options.warmup}), and another --out."
            )
        if records is not None:
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
            self.group,
            seed=self.options.seed,
            next_row=next_row,
            metadata=self.told,
            keep=self.options.keep,
        )

    def _ended(self, step: int, why: str | None) -> Literal["finished", "stopped", "interrupted"]:
        if step >= self.options.steps:
            return "finished"
        return "stopped" if why is None else "interrupted"


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


def _told_to_all(options: RunOptions, plan: Plan, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What may change from one run to the next, and must be the same for all processes of one."""
    return {
        "layout": plan.request.layout.name,
        "mesh": str(plan.mesh),
        "plan": hashlib.blake2b(plan.dump().encode(), digest_size=8).hexdigest(),
        "stop after": options.last_step,
        "checkpoint every": options.checkpoint_every,
        "keep": options.keep,
        "goes on from": None if checkpoint is None else checkpoint.point.step,
        "jax": jax.__version__,
    }


def _described(name: str, value: Any) -> dict[str, Any]:
    """A value that JSON can hold under one name, or the fields of a dict, theirs too, under its name and theirs."""
    if isinstance(value, dict):
        return {key: held for field in value for key, held in _described(f"{name}.{field}", value[field]).items()}
    return {name: json.loads(json.dumps(value))}


def _checkpoint_to_resume(options: RunOptions, told: Mapping[str, Any], shown: Listener) -> Checkpoint | None:
    """The newest whole checkpoint, if the run is to go on from one. Raises InputError where that cannot be."""
    found, begun = latest(options.out), (options.out / FILE_NAME).exists()
    if not options.resume:
        if found.checkpoint is not None:
            raise InputError(
                f"{options.out} already holds a run. Give --resume to go on with it, or another --out for a new one."
            )
        if found.passed_over:
            raise InputError(
                f"{options.out} already holds a run, without a whole checkpoint to go on from. Give another --out."
            )
        if begun:
            raise InputError(
                f"{options.out} already holds a run, which saved nothing. Give --resume to begin it again, or another --out."
            )
        return None
    if found.checkpoint is None and begun and not found.passed_over:
        # So that a job that is started again with one command goes on, however early it was ended.
        shown.say(f"the run in {options.out} saved nothing: it begins again")
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
