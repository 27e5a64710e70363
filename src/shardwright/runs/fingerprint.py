"""What a run was told: what makes it the same run when it goes on, and what its processes must agree on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from shardwright.core.plan.plan import Plan
from shardwright.runs.source import Source
from shardwright.training.options import RunOptions


def run_fingerprint(options: RunOptions, plan: Plan, source: Source) -> dict[str, Any]:
    """What must be the same for a run to go on as if it had not stopped, whatever its layout and its engine."""
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


def shared_by_processes(
    options: RunOptions, plan: Plan, goes_on_from: int | None, versions: Mapping[str, str]
) -> dict[str, Any]:
    """What may change from one run to the next, and must be the same for all processes of one."""
    return {
        "layout": plan.request.layout.name,
        "mesh": str(plan.mesh),
        "plan": hashlib.blake2b(plan.dump().encode(), digest_size=8).hexdigest(),
        "stop after": options.last_step,
        "checkpoint every": options.checkpoint_every,
        "keep": options.keep,
        "goes on from": goes_on_from,
        **versions,
    }


def _described(name: str, value: Any) -> dict[str, Any]:
    """A value that JSON can hold under one name, or the fields of a dict, theirs too, under its name and theirs."""
    if isinstance(value, dict):
        return {key: held for field in value for key, held in _described(f"{name}.{field}", value[field]).items()}
    return {name: json.loads(json.dumps(value))}
