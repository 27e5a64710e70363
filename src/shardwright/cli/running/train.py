"""`shardwright train`: plan first, then load the engine by name, if the plan has no error."""

from __future__ import annotations

import io
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.cli.running.ranks import is_rank, launch
from shardwright.cli.typed.devices import leave_out_absent_tpus, on_present_devices, simulate_devices
from shardwright.cli.typed.extras import needing_extra
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.options import TrainOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import as_typed, planned, requested
from shardwright.cli.typed.values import at_least_one
from shardwright.cli.typed.verbs import TrainVerb
from shardwright.cli.typed.written import arguments_of
from shardwright.core.engines.engines import engine_named
from shardwright.core.findings.errors import FindingsError, ShardwrightError
from shardwright.core.plan.plan import Plan
from shardwright.report.text.units import pretty_bytes, pretty_seconds
from shardwright.training.cluster import CommandLine, Processes, find_processes
from shardwright.training.options import RunOptions, RunOutcome, Silent, require_folder

if TYPE_CHECKING:
    from shardwright.report.run_progress import Logged

LOG_WIDTH = 120
"""The columns of the plan in a run's log."""

WARMUP_SHARE = 10
"""Without --warmup, the warm-up takes one step in so many."""


def run_train(verb: TrainVerb, arguments: Sequence[str]) -> int:
    """Plan and train. Returns 1 if the plan has a finding of severity error; then nothing was allocated.

    Of several processes, only the first prints. ``arguments``: the command line, with which ranks are started.
    """
    engine = engine_named(verb.plan.engine)
    # The options about processes are for the parent command, which has numbered its ranks.
    options = _process_options(verb.run)
    if is_rank(os.environ):
        options = replace(options, coordinator=None, count=None, index=None)
    processes, note = find_processes(options, os.environ, socket.getfqdn, engine)
    run, defaults = run_options(verb.run, devices=verb.plan.devices, processes=processes)
    if engine == "jax":
        _simulate(run)
    prints = processes is None or processes.index == 0
    views = prints and not verb.plan.json
    at_least_one("--log-every", verb.run.log_every)
    typed_verb = verb
    # Ranks that a command started have its standard error, and it has said what the model is.
    verb = with_named_model(verb, shows=prints and not is_rank(os.environ))
    verb, sized = on_present_devices(verb, engine, processes)
    typed = requested(verb.model, verb.layout, verb.plan)
    # A run that goes on has what was chosen for this one.
    layout, options_of_plan = as_typed(typed, typed_verb.layout, typed_verb.plan)
    typed_verb = replace(typed_verb, layout=layout, plan=options_of_plan)
    plan = planned(typed)
    if engine == "torch" and processes is None and plan.mesh.num_devices > 1 and not plan.errors:
        # Each rank plans for itself, and the first of them prints. Starting them takes seconds.
        require_folder(verb.run.out)
        return launch(plan.mesh.num_devices, arguments, verb.run.out)
    run = replace(run, command=("shardwright", *arguments), arguments=tuple(arguments_of(typed_verb)))
    head = ""
    if views:
        from shardwright.report.plan.plan_view import plan_view
        from shardwright.report.text.terminal import to_text

        view = plan_view(plan, {**typed.chosen, **sized, **defaults})
        head = to_text(view, io.StringIO(), LOG_WIDTH)
        write_view(view, sys.stdout)
        sys.stdout.write("\n" if note is None else f"\n{note}\n")
        sys.stdout.flush()
    if plan.errors:
        if verb.plan.json:
            raise FindingsError(plan.errors)
        sys.stderr.write("shardwright: the plan has errors, so nothing was started.\n")
        return 1
    train = _engine(engine)
    if run.weights is not None:
        # A model folder needs no checkpoint made of it first.
        direct = import_module("shardwright.interop.hugging_face.weights.direct")
        train = partial(train, open_folder=direct.open_model_folder)
    with _own_output(processes):
        if views:
            from shardwright.report.run_progress import Logged, run_progress

            with run_progress(verb.run.log_every) as shown, _logged(Logged(shown, run.out, verb.run.log_every)) as log:
                log.write(head)
                outcome = train(run, plan, log)
                log.write(ended(outcome, run, plan))
        else:
            shown = _AsJson() if prints else Silent()
            outcome = train(run, plan, shown)
            if prints:
                write_json({"plan": plan.to_json(), "run": {**outcome.to_json(), "said": shown.messages}})
        if views:
            sys.stdout.write(ended(outcome, run, plan) + "\n")
    return 0


@contextmanager
def _logged(log: Logged) -> Iterator[Logged]:
    """The log, with what ended the command, where that was an error."""
    try:
        yield log
    except ShardwrightError as error:
        log.write(f"shardwright: {error}")
        raise


def _simulate(run: RunOptions) -> None:
    """Before JAX is loaded, which a plan with an optimizer of optax does."""
    each = run.devices if run.devices is None or run.processes is None else run.devices // run.processes.count
    simulate_devices(each, os.environ, jax_is_loaded="jax" in sys.modules)
    leave_out_absent_tpus(os.environ, jax_is_loaded="jax" in sys.modules)


def _engine(engine: str) -> Callable[..., RunOutcome]:
    """The engine's ``train``, loaded by name."""
    if engine == "torch":
        with needing_extra("torch", "training on PyTorch"):
            return import_module("shardwright.engine_torch.training.run").train
    with needing_extra("jax", "training on JAX"):
        return import_module("shardwright.engine_jax.training.run").train


def _process_options(options: TrainOptions) -> CommandLine:
    return CommandLine(
        coordinator=options.coordinator,
        count=options.processes,
        index=options.process,
        join_timeout_s=options.join_timeout,
        stall_timeout_s=options.stall_timeout,
    )


class _AsJson(Silent):
    """Writes the JSON object of --json also where the run has no outcome."""

    def end(self, why: str, exit_code: int) -> None:
        super().end(why, exit_code)
        write_json({"error": {"exit_code": exit_code, "message": why}})
        sys.stdout.flush()


@contextmanager
def _own_output(processes: Processes | None) -> Iterator[None]:
    """Keeps standard output for this program: Gloo, which JAX uses between CPU processes, prints its connections there."""
    if processes is None:
        yield
        return
    sys.stdout.flush()
    kept, before = os.dup(1), sys.stdout
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        with os.fdopen(os.dup(kept), "w", encoding=before.encoding, errors=before.errors) as sys.stdout:
            yield
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)


def ended(outcome: RunOutcome, run: RunOptions, plan: Plan | None = None) -> str:
    """How the run ended, where its files are, and how to go on with it."""
    loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
    lines = [f"{outcome.ended} after step {outcome.step:,} of {run.steps:,}{loss}"]
    if outcome.checkpoint is not None:
        lines.append(f"  checkpoint  {outcome.checkpoint}")
    lines.append(f"  metrics     {outcome.metrics}")
    step = None if plan is None else plan.step
    if step is not None and outcome.step_s is not None:
        planned_s, measured_s = pretty_seconds(step.seconds), pretty_seconds(outcome.step_s)
        lines.append(f"  a step      {measured_s}, planned {planned_s}: {outcome.step_s / step.seconds - 1:+.0%}")
    if plan is not None and outcome.measured_bytes is not None:
        measured, planned = outcome.measured_bytes, plan.memory.total_bytes_per_device
        lines.append(
            f"  a device    {pretty_bytes(measured)}, planned {pretty_bytes(planned)}: {measured / planned - 1:+.0%}"
        )
    if outcome.ended != "finished":
        lines.append(f"  to go on    shardwright train --resume {shlex.quote(str(run.out))}, on any layout")
    return "\n".join(lines)


def names_in(text: str | None) -> tuple[str, ...]:
    """The names in a list with commas, as those of options.

    >>> names_in("lr, weight_decay")
    ('lr', 'weight-decay')
    """
    return () if text is None else tuple(dict.fromkeys(one.strip().replace("_", "-") for one in text.split(",")))


def run_options(
    options: TrainOptions, *, devices: int | None, processes: Processes | None = None
) -> tuple[RunOptions, dict[str, str]]:
    """The run's options with all defaults filled in, and the defaults that were used, by option.

    Raises InputError for invalid numbers.
    """
    defaults: dict[str, str] = {}
    warmup = options.warmup
    if warmup is None:
        warmup = max(0, options.steps) // WARMUP_SHARE
        defaults["--warmup"] = str(warmup)
    run = RunOptions(
        steps=options.steps,
        out=options.out,
        data=options.data,
        tokenizer=None if options.tokenizer is None else Path(options.tokenizer),
        stop_after=options.stop_after,
        lr=options.lr,
        warmup=warmup,
        weight_decay=options.weight_decay,
        clip=options.clip,
        seed=options.seed,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        keep_every=options.keep_every,
        keep_every_hours=options.keep_every_hours,
        keep_best=options.keep_best,
        best_of=options.best_of,
        async_checkpoints=options.async_checkpoints,
        checkpoints=options.checkpoints,
        weights=options.weights,
        weights_new=tuple(one for each in options.weights_new for one in each),
        weights_skip=tuple(one for each in options.weights_skip for one in each),
        weights_cast=options.weights_cast,
        resume=options.resume,
        resume_from=options.resume_from,
        change=names_in(options.change),
        tensorboard=options.tensorboard,
        devices=devices,
        processes=processes,
    )
    untouched = TrainOptions(steps=options.steps, out=options.out)
    for name in ("data", "lr", "weight_decay", "clip", "seed"):
        if getattr(options, name) == getattr(untouched, name):
            defaults[f"--{name.replace('_', '-')}"] = f"{getattr(options, name)}"
    return run, defaults
