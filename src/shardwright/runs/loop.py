"""The loop over the steps of a run: record each step, save when due, end after the same step in all processes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from shardwright.checkpoint import RunPoint
from shardwright.core.plan.plan import Plan
from shardwright.runs.background import Saver
from shardwright.runs.engine import Engine
from shardwright.runs.fingerprint import rules_of_run
from shardwright.runs.hold import Hold
from shardwright.runs.metrics.journal import BoardWriter, Journal, journal, keep_later_lines
from shardwright.runs.metrics.rates import Rates, rates_of
from shardwright.runs.metrics.records import RunError, StepMetrics, beside_plan, record_of, require_sound
from shardwright.runs.metrics.run_record import recorded
from shardwright.runs.processes.group import Ending, Group
from shardwright.runs.processes.replicas import require_equal, unequal_weights
from shardwright.runs.processes.signals import Stop, stop_on_signal
from shardwright.runs.resuming import rename_conflicting
from shardwright.runs.source import Source, batches
from shardwright.runs.store import key_of_run
from shardwright.storage.url import Place
from shardwright.training.changes import CHANGES, Change
from shardwright.training.optimizer import learning_rate, optimizer_options
from shardwright.training.options import METRICS_FILE, SAVED_METRICS, Listener, RunOptions, RunOutcome

TOKENS_SEEN = "tokens_seen"
"""The field of a checkpoint's metadata with the valid tokens of all steps until then."""

SETTLED = 2
"""The first steps of a run, which its time for a step leaves out: they compile, allocate or fill caches."""


def tokens_seen(metadata: Mapping[str, Any]) -> int | None:
    """The valid tokens that a checkpoint's run has seen; None where it does not say it. Anybody may have written it."""
    number = metadata.get(TOKENS_SEEN)
    return number if type(number) is int else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """All that the steps need. ``fingerprint``: the values that a resumed run must keep; saved in each checkpoint, and so is
    ``published``, what was published with the weights that the run began with.

    ``changes``: of options, until now; saved too. ``skipped``: the checkpoints that are proven damaged, and how. ``hold``: the lock of
    the folder, in the process that has it. ``tokens_seen``: the valid tokens of the steps that are done; None where the checkpoint does not
    say it.
    """

    options: RunOptions
    plan: Plan
    engine: Engine
    source: Source
    fingerprint: Mapping[str, Any]
    published: Mapping[str, Any]
    changes: Sequence[Change]
    skipped: Mapping[Place, str]
    shown: Listener
    writer: BoardWriter | None
    group: Group
    tokens_seen: int | None
    hold: Hold | None = None

    def go(self, first: int, next_row: int, saved: Place | None) -> RunOutcome:
        """Train the steps after the first ``first`` ones, from row ``next_row`` on. ``saved``: the checkpoint of step ``first``."""
        last = self.options.last_step
        if first >= last:
            self.shown.say(f"nothing to do: {first} steps are done, and this run ends at {last}")
            return RunOutcome(
                ended=self._ended(first, None),
                step=first,
                loss=None,
                checkpoint=saved,
                metrics=self.options.out / METRICS_FILE,
                changes=self.changes,
            )
        with stop_on_signal() as stop:
            self.shown.doing("compiling the step")
            self.engine.prepare()
            # Gloo waits only 30 s for its peers, and the compile times of two processes may differ by more.
            self.group.exchange("the step is compiled", None)
            with self._journal(first) as records, self._recorded(first) as outcomes:
                outcomes.append(self._train(first, next_row, saved, stop, records))
                return outcomes[-1]

    def _train(self, first: int, next_row: int, saved: Place | None, stop: Stop, records: Journal | None) -> RunOutcome:
        last = self.options.last_step
        loss, ending = math.nan, Ending(last)
        times: list[float] = []
        seen, rates = self.tokens_seen, rates_of(self.plan, self.engine.device_name)
        with (
            Saver(
                self.options.saved_under,
                self.group,
                self.shown,
                keep=rules_of_run(self.options),
                asynchronous=self.options.async_checkpoints,
                run=self._key(),
                others=self.options.checkpoints is not None,
            ) as saver,
            batches(self.source, self.plan, self.engine.offsets, self.options.seed, next_row) as ahead,
        ):
            self.shown.begin(first, last)
            for number in range(first + 1, last + 1):
                started = time.perf_counter()
                with self.group.stepping(number):
                    batch = next(ahead)
                    metrics = self.engine.step(batch, saver.wait_copied)
                saver.check()
                step_s = time.perf_counter() - started
                times.append(step_s)
                seen = None if seen is None else seen + metrics.tokens
                self._record(number, metrics, step_s, seen, rates, records)
                if number == first + 1:
                    self._compare_weights(number)
                loss = metrics.loss
                # Read the signal only once: one that came between two reads would end the run without saving it.
                ending = self.group.stop_after(number, last, stop.signal.name if stop.signal is not None else None)
                if self._is_due(number) or number == ending.last:
                    saved = self._save(saver, number, batch.next_row, metrics, seen)
                if number == ending.last:
                    break
        if ending.why is not None:
            self.shown.say(f"{ending.why}: stopped after step {ending.last}; saved in {saved}")
        return RunOutcome(
            ended=self._ended(ending.last, ending.why),
            step=ending.last,
            loss=loss,
            checkpoint=saved,
            metrics=self.options.out / METRICS_FILE,
            changes=self.changes,
            step_s=median(times[SETTLED:]) if len(times) > SETTLED else None,
            measured_bytes=self.engine.peak_bytes,
        )

    def _recorded(self, first: int) -> AbstractContextManager[list[RunOutcome]]:
        """The record of this start. Process 0 alone writes it."""
        if self.group.index != 0:
            return nullcontext([])
        return recorded(self.options, self.plan, self.engine.versions, first, self.shown.say)

    def _journal(self, first: int) -> AbstractContextManager[Journal | None]:
        """The journal. Process 0 alone writes it, and renames checkpoints that the run would meet: it holds the folder."""
        if self.group.index != 0:
            return nullcontext()
        if self.options.resume_from is not None:
            keep_later_lines(self.options.out, first, self.shown.say)
        rename_conflicting(self.options, first, self.skipped, self.shown)
        return journal(self.options.out, first_step=first, writer=self.writer, say=self.shown.say)

    def _key(self) -> str | None:
        """The key of the run in an object store. Process 0 alone begins saves, and it holds the folder."""
        return key_of_run(self.options.out, self.options.saved_under) if self.group.index == 0 else None

    def _record(
        self,
        number: int,
        metrics: StepMetrics,
        step_s: float,
        tokens_seen: int | None,
        rates: Rates,
        records: Journal | None,
    ) -> None:
        require_sound(number, metrics, self.options, self.plan)
        if metrics.grown_rows is not None:
            self.shown.say(
                f"step {number}: a device received more tokens than its experts' buffers had room for; they have {metrics.grown_rows:,} rows now, "
                "and the step was done again"
            )
        if self.hold is not None:
            self.hold.keep()
        peak_bytes = self.engine.peak_bytes
        record = record_of(
            number,
            metrics,
            step_s,
            rates,
            # The rate of a step is that after the steps before it.
            lr=learning_rate(optimizer_options(self.options), number - 1),
            tokens_seen=tokens_seen,
            peak_bytes=peak_bytes,
            time_s=time.time(),
        )
        if number == self.options.last_step:
            record = beside_plan(record, self.plan, peak_bytes)
        if records is not None:
            records.write(record)
        self.shown.step(record)

    def _compare_weights(self, number: int) -> None:
        """Once: what replicas are after a step, they were made of the same values and gradients."""
        unequal = unequal_weights(self.engine.weight_replicas(), self.group, number)
        if unequal is not None:
            raise RunError(unequal)

    def _is_due(self, number: int) -> bool:
        every = self.options.checkpoint_every
        return every is not None and number % every == 0

    def _save(self, saver: Saver, step: int, next_row: int, metrics: StepMetrics, tokens_seen: int | None) -> Place:
        point = RunPoint(
            step=step,
            seed=self.options.seed,
            data_position=next_row,
            model=self.plan.request.table.name,
            layout_name=self.plan.request.layout.name,
            layout_text=self.plan.dump(),
            mesh=self.plan.mesh.shape,
            metadata={
                **self.fingerprint,
                **self.published,
                **self._changes(),
                **({} if tokens_seen is None else {TOKENS_SEEN: tokens_seen}),
            },
            metrics={name: getattr(metrics, name) for name in SAVED_METRICS},
        )
        if self.plan.delayed:
            require_equal(self.engine.replicas(), self.group, step)
        return saver.save(point, self.engine.tensors(), self.engine.boxes())

    def _changes(self) -> dict[str, Any]:
        return {CHANGES: [change.to_json() for change in self.changes]} if self.changes else {}

    def _ended(self, step: int, why: str | None) -> Literal["finished", "stopped", "interrupted"]:
        if step >= self.options.steps:
            return "finished"
        return "stopped" if why is None else "interrupted"
