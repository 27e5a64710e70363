"""Fingerprints of a run: the options that a resumed run must keep, and those on which its processes must agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint import Retention
from shardwright.core.model.architecture import architecture_values
from shardwright.core.plan.plan import Plan
from shardwright.core.recipes.shown import recipe_text
from shardwright.runs.source import Source
from shardwright.training.options import SAVED_METRICS, RunOptions


def run_fingerprint(options: RunOptions, plan: Plan, source: Source) -> dict[str, Any]:
    """The values that a resumed run must keep to go on as if it had not stopped. Layout and engine are not among them."""
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
        **{
            name: value for name in ("master_dtype", "gradients_dtype") if (value := getattr(request, name)) is not None
        },
        "optimizer": request.optimizer.text,
        "average": request.average,
        "tokenizer": source.corpus.tokenizer,
        "corpus": source.digest,
        "precision": None if request.precision is None else recipe_text(request.precision.numbers),
        **({} if options.weights is None else {"weights": str(options.weights)}),
        **architecture_values(request.table),
    }


def shared_by_processes(
    options: RunOptions, plan: Plan, goes_on_from: int | None, versions: Mapping[str, str]
) -> dict[str, Any]:
    """The values that may change when a run is resumed, and must be the same in all processes of one run."""
    return {
        "layout": plan.request.layout.name,
        "mesh": str(plan.mesh),
        "plan": hashlib.blake2b(plan.dump().encode(), digest_size=8).hexdigest(),
        "precision": None if plan.request.precision is None else recipe_text(plan.request.precision),
        "microbatches": plan.request.microbatches,
        "recomputed": plan.request.remat,
        "loss chunks": plan.request.loss_chunks,
        "stages": None if plan.pipeline is None else f"{plan.pipeline.choice.schedule} {plan.pipeline.choice.text}",
        "stop after": options.last_step,
        "checkpoint every": options.checkpoint_every,
        "keep": rules_of_run(options).to_json(),
        "async checkpoints": options.async_checkpoints,
        "change": list(options.change),
        "weights new": list(options.weights_new),
        "weights skip": list(options.weights_skip),
        "weights cast": options.weights_cast,
        "checkpoints": None if options.checkpoints is None else str(options.checkpoints),
        "goes on from": goes_on_from,
        **versions,
    }


def rules_of_run(options: RunOptions) -> Retention:
    """Which checkpoints of a run are kept."""
    return Retention(
        newest=options.keep,
        every_steps=options.keep_every,
        every_hours=options.keep_every_hours,
        best=options.keep_best,
        best_of=options.best_of or SAVED_METRICS[0],
    )
