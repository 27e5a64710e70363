"""From options to the request in a lock, and back. The layout's path in a lock is relative to the lock's folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.request import TypedRequest, typed_request
from shardwright.cli.typed.values import moves, settings
from shardwright.cli.typed.written import typed_options
from shardwright.core.findings.errors import InputError
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.model.training_only import TrainingOnly
from shardwright.core.recipes.presets import PRESETS
from shardwright.layouts import preset_names
from shardwright.layouts.policy_file import is_file
from shardwright.locks.lock import Lock
from shardwright.locks.lock_request import LockRequest


def request_of(
    typed: TypedRequest, layout_name: str | None, options: PlanOptions, model: str, lock: Path
) -> LockRequest:
    """The request of a lock that will be written to ``lock``."""
    request = typed.request
    name = typed.chosen["--layout"] if layout_name is None else layout_name
    return LockRequest(
        model=model,
        settings=settings(options.set),
        layout=_named(name, preset_names(), lock),
        mesh=dict(request.mesh_sizes),
        devices=options.devices,
        move=moves(options.move) if options.move is not None else {},
        chips=options.chips,
        engine=request.engine,
        batch=request.batch,
        length=request.length,
        dtype=request.dtype,
        weights_dtype=request.weights_dtype,
        moments_dtype=request.moments_dtype,
        remat=_from_folder(options.remat, lock) if options.remat and is_file(options.remat) else request.remat,
        microbatches=request.microbatches,
        expert_buffer=request.expert_buffer,
        load_balance=request.load_balanced,
        optimizer=request.optimizer.name,
        optimizer_settings=settings(options.optimizer_set, "--optimizer-set"),
        loss_chunks=request.loss_chunks,
        average=request.average,
        tokens=request.training_tokens,
        price=request.device_hour_price,
        master_dtype=request.master_dtype,
        gradients_dtype=request.gradients_dtype,
        precision=_named(options.precision, tuple(PRESETS), lock),
        schedule=options.schedule,
        stages=options.stages,
        hops=options.hops,
        by_default=tuple(option.removeprefix("--").replace("-", "_") for option in typed.chosen),
    )


def request_of_lock(lock: Lock, path: Path) -> TypedRequest:
    """The request of a lock, with the layout file, the model and the defaults as they are now.

    Raises InputError, which names the lock, where one of them is missing or no longer takes the lock's options;
    FindingsError for a layout file that is not a valid layout.
    """
    try:
        return typed_request(lock.request.model, layout_of(lock.request, path), options_of_lock(lock, path))
    except InputError as error:
        raise InputError(f"{path}: its request cannot be planned: {error}") from None


def options_of(request: LockRequest, path: Path) -> PlanOptions:
    """The options of a request of the lock at ``path``. Those in ``by_default`` are left open."""
    left_open = request.by_default
    return PlanOptions(
        mesh=None if "mesh" in left_open or not request.mesh else _pairs(request.mesh),
        move=_pairs(request.move) or None,
        engine=None if "engine" in left_open else request.engine,
        batch=None if "batch" in left_open else request.batch,
        length=None if "length" in left_open else request.length,
        chips=request.chips,
        devices=request.devices,
        set=_words(request.settings),
        weights_dtype=None if "weights_dtype" in left_open else request.weights_dtype,
        moments_dtype=None if "moments_dtype" in left_open else request.moments_dtype,
        dtype=None if "dtype" in left_open else request.dtype,
        remat=None if "remat" in left_open else _from_here(request.remat, path),
        microbatches=None if "microbatches" in left_open else request.microbatches,
        expert_buffer=request.expert_buffer,
        load_balance=request.load_balance,
        optimizer=None if request.optimizer == ADAMW.name else request.optimizer,
        optimizer_set=_words(request.optimizer_settings),
        loss_chunks=None if request.loss_chunks == 1 else request.loss_chunks,
        average=request.average,
        tokens=request.tokens,
        price=request.price,
        master_dtype=request.master_dtype,
        gradients_dtype=request.gradients_dtype,
        precision=None if request.precision is None else _from_here(request.precision, path),
        schedule=request.schedule,
        stages=request.stages,
        hops=request.hops,
    )


def options_of_lock(lock: Lock, path: Path) -> PlanOptions:
    """The options of a lock's request, with what the lock says of training alone."""
    rows = lock.plan.get("training_only")
    training = None if rows is None else tuple(TrainingOnly(**row) for row in rows)
    return replace(options_of(lock.request, path), training_only=training)


def layout_of(request: LockRequest, path: Path) -> str | None:
    """The layout's name, or the path of its file from the working directory; None for the model's natural layout."""
    if request.is_preset:
        return None if "layout" in request.by_default else request.layout
    return _from_here(request.layout, path)


def command_of(request: LockRequest, path: Path) -> str:
    """The command that writes the lock again."""
    options = options_of(request, path)
    words = ["shardwright", "lock", request.model]
    layout = layout_of(request, path)
    words += ["--layout", layout] if layout is not None else []
    return shlex.join([*words, *typed_options(options), "--out", str(path)])


def _words(values: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    return (tuple(f"{name}={value}" for name, value in values.items()),) if values else ()


def _pairs(values: Mapping[str, object]) -> str:
    return ",".join(f"{name}={value}" for name, value in values.items())


def _named(name: str | None, known: Sequence[str], lock: Path) -> Any:
    """A preset's name as it is; the path of a file, relative to the lock's folder."""
    return name if name is None or name in known else _from_folder(name, lock)


def _from_here(name: str, lock: Path) -> str:
    """A preset's name as it is; the path of a file in a lock, from the working directory."""
    if "/" not in name:
        return name
    found = os.path.relpath(os.path.join(_folder(lock), name))
    return found if "/" in found or found.endswith((".yaml", ".yml")) else f"./{found}"


def _from_folder(name: str, lock: Path) -> str:
    """The path of a layout file, relative to the lock's folder."""
    folder = os.path.realpath(os.path.dirname(name) or ".")
    found = os.path.relpath(os.path.join(folder, os.path.basename(name)), _folder(lock))
    return found if found.startswith("../") else f"./{found}"


def _folder(lock: Path) -> str:
    """The folder of a lock, without symbolic links: a relative path cannot go back up through one."""
    return os.path.dirname(os.path.realpath(lock))
