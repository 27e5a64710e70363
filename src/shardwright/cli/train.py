"""`shardwright train`: the plan first, then the engine, which is loaded by name when the plan has no error."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping
from importlib import import_module
from pathlib import Path

from shardwright.cli.extras import needing_extra
from shardwright.cli.options import TrainOptions, TrainVerb
from shardwright.cli.output import write_json, write_view
from shardwright.cli.request import asked, planned
from shardwright.core.errors import FindingsError, InputError
from shardwright.core.run import RunOptions, RunOutcome

SIMULATED_DEVICES = "--xla_force_host_platform_device_count"
WARMUP_SHARE = 10
"""Without --warmup, the learning rate rises for one step in so many."""


def run_train(verb: TrainVerb) -> int:
    """Plan and train. 1 where the plan has a finding of severity error: then nothing was allocated."""
    run, defaults = run_options(verb.run, devices=verb.plan.devices)
    question = asked(verb.model, verb.layout, verb.plan)
    if question.request.engine == "torch":
        raise InputError("--engine torch: the PyTorch engine does not train yet. `shardwright plan` knows its layouts.")
    plan = planned(question)
    if not verb.plan.json:
        from shardwright.report.plan_view import plan_view

        write_view(plan_view(plan, {**question.chosen, **defaults}, tensors=False), sys.stdout)
        sys.stdout.write("\n")
        sys.stdout.flush()
    if plan.errors:
        if verb.plan.json:
            raise FindingsError(plan.errors)
        sys.stderr.write("shardwright: the plan has errors, so nothing was started.\n")
        return 1
    simulate_devices(run.devices, os.environ, jax_is_loaded="jax" in sys.modules)
    with needing_extra("jax", "training on JAX"):
        train = import_module("shardwright.engine_jax.run").train
    if verb.plan.json:
        outcome = train(run, plan)
    else:
        from shardwright.report.run_progress import run_progress

        with run_progress() as shown:
            outcome = train(run, plan, shown)
    if verb.plan.json:
        write_json({"plan": plan.to_json(), "run": outcome.to_json()})
    else:
        sys.stdout.write(ended(outcome, run) + "\n")
    return 0


def ended(outcome: RunOutcome, run: RunOptions) -> str:
    """How the run ended, where everything is, and how it goes on."""
    loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
    lines = [f"{outcome.ended} after step {outcome.step:,} of {run.steps:,}{loss}"]
    if outcome.checkpoint is not None:
        lines.append(f"  checkpoint  {outcome.checkpoint}")
    lines.append(f"  metrics     {outcome.metrics}")
    if outcome.ended != "finished":
        lines.append("  to go on    the same command with --resume, on any layout")
    return "\n".join(lines)


def run_options(options: TrainOptions, *, devices: int | None) -> tuple[RunOptions, dict[str, str]]:
    """The run's options with every default filled in, and the options that stand for those.

    Raises InputError for numbers that cannot be.
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
        resume=options.resume,
        tensorboard=options.tensorboard,
        devices=devices,
    )
    untouched = TrainOptions(steps=options.steps, out=options.out)
    for name in ("data", "lr", "weight_decay", "clip", "seed"):
        if getattr(options, name) == getattr(untouched, name):
            defaults[f"--{name.replace('_', '-')}"] = f"{getattr(options, name)}"
    return run, defaults


def simulate_devices(devices: int | None, environment: MutableMapping[str, str], *, jax_is_loaded: bool) -> None:
    """Have JAX's CPU backend show so many devices: a flag that XLA reads once, when JAX starts.

    Nothing is changed when no number was asked for, when JAX has started, or when JAX_PLATFORMS leaves the CPU out.
    The flag goes behind those in XLA_FLAGS, in place of one with another number.
    """
    platforms = environment.get("JAX_PLATFORMS", "")
    if devices is None or jax_is_loaded or (platforms and "cpu" not in platforms.split(",")):
        return
    others = re.sub(rf"{SIMULATED_DEVICES}=\S*", "", environment.get("XLA_FLAGS", "")).split()
    environment["XLA_FLAGS"] = " ".join([*others, f"{SIMULATED_DEVICES}={devices}"])
