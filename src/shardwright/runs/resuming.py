"""Where a run begins: at step 0, with which weights, or at which checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.checkpoint import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    committed,
    latest,
    open_checkpoint,
    open_newest,
    set_aside,
    step_of,
)
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.escaped import escaped
from shardwright.core.model.architecture import differences_of_weights
from shardwright.core.model.optimizer import ADAMW
from shardwright.core.plan.plan import Plan
from shardwright.runs.engine import OpenFolder, Weights
from shardwright.runs.partial import fitted_weights, partial_of, without_configuration
from shardwright.runs.store import require_store
from shardwright.storage.files import same_folder, write_durable
from shardwright.storage.url import Place
from shardwright.training.changes import Change, changes_between
from shardwright.training.options import METRICS_FILE, Listener, RunOptions
from shardwright.training.partial import ALL_WEIGHTS, CAST, OFFER, SHOWN_BY_TENSORS
from shardwright.training.published import METADATA

WEIGHTS_FILE = "weights.txt"
"""The ``--weights`` of a run, in its folder: until its first checkpoint nothing else says that it has some."""


WITHOUT = {"optimizer": ADAMW.text, "average": None}
"""What a run did whose checkpoint does not say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The checkpoint to resume from, or None for a new run. ``skipped``: newer ones that are proven damaged, and how."""

    checkpoint: Checkpoint | None
    skipped: Mapping[Place, str]

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.point.step


def beginning(options: RunOptions, fingerprint: Mapping[str, Any], shown: Listener) -> Beginning:
    """Where a run begins. Reads no element of a checkpoint, and changes nothing. Raises InputError where it may not begin."""
    if options.resume or options.resume_from is not None:
        require_store(options.out, options.checkpoints)
    if options.resume_from is not None:
        found = Beginning(checkpoint=_of_step(options.saved_under, options.resume_from), skipped={})
    elif options.resume:
        found = _newest(options, {}, shown)
    else:
        _require_no_run(options.out, options.saved_under)
        return Beginning(checkpoint=None, skipped={})
    if found.checkpoint is not None:
        _require_run(found.checkpoint)
        changes_of(found.checkpoint, fingerprint, options)
    return found


def changes_of(checkpoint: Checkpoint, fingerprint: Mapping[str, Any], options: RunOptions) -> tuple[Change, ...]:
    """The options that change where a run goes on from a checkpoint. Raises InputError for one that --change does not name."""
    point = checkpoint.point
    return changes_between(
        {**WITHOUT, **point.metadata}, fingerprint, options.change, point.step, str(checkpoint.directory)
    )


def older(
    options: RunOptions, before: Beginning, damage: str, fingerprint: Mapping[str, Any], shown: Listener
) -> Beginning:
    """The next older checkpoint, after damaged elements were found in ``before``. Raises InputError where there is none."""
    assert before.checkpoint is not None
    if options.resume_from is not None:
        raise InputError(
            f"--resume-from {options.resume_from}: {damage} Nothing was changed. Give --resume instead, which takes the "
            f"newest intact one, or another step."
        )
    directory = before.checkpoint.directory
    shown.say(f"skipped a damaged checkpoint: {damage}")
    found = _newest(options, {**before.skipped, directory: damage}, shown)
    assert found.checkpoint is not None
    _require_run(found.checkpoint)
    changes_of(found.checkpoint, fingerprint, options)
    return found


def rename_conflicting(options: RunOptions, first: int, skipped: Mapping[Place, str], shown: Listener) -> None:
    """Rename the checkpoints that a run would meet when it saves steps after ``first``. Nothing is deleted.

    These are the ones proven damaged; and, only with --resume-from, those of later steps. Called by the process that holds
    the folder. Raises CheckpointError where one cannot be renamed.
    """
    for directory in skipped:
        shown.say(f"kept under another name, damaged: {set_aside(directory, 'damaged')}")
    if options.resume_from is None:
        return
    for directory in committed(options.saved_under):
        if (step := step_of(directory)) is not None and step > first:
            shown.say(f"kept under another name, later than step {first}: {set_aside(directory, 'set-aside')}")


def record_weights(out: Path, weights: Place) -> None:
    """Write down with which weights a run begins. Raises InputError where that cannot be written."""
    try:
        # Of a run that was killed while it wrote this.
        (out / f"{WEIGHTS_FILE}.tmp").unlink(missing_ok=True)
        write_durable(out / WEIGHTS_FILE, os.fsencode(str(weights)) + b"\n")
    except OSError as error:
        raise InputError(f"{out / WEIGHTS_FILE}: cannot be written: {error.strerror}.") from None


def open_weights(
    path: Place,
    options: RunOptions,
    plan: Plan,
    fingerprint: Mapping[str, Any],
    open_folder: OpenFolder | None,
    shown: Listener,
) -> Weights:
    """The weights that a run begins with: of a checkpoint, or of a folder that ``open_folder`` knows. Reads no element.

    Raises InputError where their folder is the run's, and where they cannot be opened, are of another model, or do not fit it.
    """
    partial = partial_of(options, plan)
    if any(same_folder(path, out) for out in (options.out, options.saved_under)):
        raise InputError(f"--weights {path}: the run would write into this folder. Give another --out.")
    try:
        known = None if open_folder is None else open_folder(path, plan, partial)
        weights, notes = (open_newest(path), ()) if known is None else known
    except InputError as error:
        nothing = open_folder is not None and isinstance(path, Path) and not (path.is_dir() and any(path.iterdir()))
        more = " Or give a model folder, with config.json and safetensors files." if nothing else ""
        raise InputError(f"--weights: {error}{more}") from None
    for note in notes:
        shown.say(note)
    theirs = weights.point.metadata
    changed = differences_of_weights(theirs, fingerprint, partial.permitted)
    if changed:
        raise InputError(
            f"--weights {path}: these are weights of another model than {plan.request.table.name}:\n"
            + "\n".join(changed)
            + "\nGive its dimensions with --set."
            + ("" if differences_of_weights(theirs, fingerprint, SHOWN_BY_TENSORS) else f" {OFFER}")
        )
    for row in plan.weights:
        found = weights.tensors.get(row.name)
        if not partial.cast and row.name not in partial.new and found is not None and found.dtype != row.dtype:
            raise InputError(
                f"--weights {path}: '{row.name}' is stored in {found.dtype}, and this run has it in {row.dtype}. Give "
                f"--weights-dtype {found.dtype}, import the weights again with --dtype {row.dtype}, or cast them with {CAST}."
            )
    # The folder's own names are known there: what it leaves out is left out.
    fitted, lines = fitted_weights(weights, plan, partial if known is None else replace(partial, skip=()), options.seed)
    for line in lines:
        shown.say(line)
    if differences_of_weights(theirs, fingerprint):
        fitted = replace(fitted, point=without_configuration(fitted.point))
    return weights if partial == ALL_WEIGHTS else fitted


def _newest(options: RunOptions, skipped: Mapping[Place, str], shown: Listener) -> Beginning:
    """The newest checkpoint that opens without damage; None for a run that ended before it saved any."""
    damaged = dict(skipped)
    for directory in committed(options.saved_under):
        if directory in damaged:
            continue
        try:
            return Beginning(checkpoint=open_checkpoint(directory), skipped=damaged)
        except DamagedError as error:
            damaged[directory] = str(error)
            shown.say(f"skipped a damaged checkpoint: {error}")
        except CheckpointError as error:
            raise InputError(
                f"--resume: {error} Nothing proves that it is damaged, so it was not skipped. See why, or give the "
                f"step to go on from with --resume-from."
            ) from None
    if damaged:
        lines = "".join(f"\n  {error}" for error in damaged.values())
        raise InputError(
            f"--resume: there is no intact checkpoint under {options.saved_under}, and nothing was changed. Restore one from a copy, or "
            f"begin anew with another --out.{lines}"
        )
    if not (options.out / METRICS_FILE).exists():
        raise InputError(
            f"--resume: there is no intact checkpoint under {options.saved_under}. "
            f"Give the --out of the run to go on with, or leave --resume out."
        )
    recorded = options.out / WEIGHTS_FILE
    if options.weights is None and recorded.exists():
        weights = os.fsdecode(recorded.read_bytes()).rstrip("\n")
        raise InputError(
            f"--resume: the run in {options.out} saved nothing, and it began with the weights of {escaped(weights)}. Give them "
            f"again with --weights, or begin anew with another --out."
        )
    # A job that always starts with --resume must also work if it ended before its first checkpoint.
    shown.say(f"the run in {options.out} saved nothing: it begins again")
    if options.change:
        shown.say(
            f"--change {','.join(options.change)} changes nothing: the run begins with the options as they are given"
        )
    return Beginning(checkpoint=None, skipped={})


def _of_step(out: Place, step: int) -> Checkpoint:
    there = {number: directory for directory in committed(out) if (number := step_of(directory)) is not None}
    if step not in there:
        known = ", ".join(str(number) for number in sorted(there)) or "none"
        raise InputError(
            f"--resume-from {step}: there is no checkpoint of that step under {out}. Those there: {known}."
        )
    try:
        return open_checkpoint(there[step])
    except CheckpointError as error:
        raise InputError(
            f"--resume-from {step}: {error} Nothing was changed. Give --resume instead, which takes the newest intact one, "
            f"or another step."
        ) from None


def _require_no_run(out: Path, saved_under: Place) -> None:
    found = latest(saved_under)
    if found.checkpoint is not None:
        _require_run(found.checkpoint)
        raise InputError(
            f"{saved_under} already holds a run. Give --resume to go on with it, or another {_option(out, saved_under)} for a new one."
        )
    if found.passed_over:
        raise InputError(
            f"{saved_under} already holds a run, without an intact checkpoint to go on from. Give another {_option(out, saved_under)}."
        )
    if (out / METRICS_FILE).exists():
        raise InputError(
            f"{out} already holds a run, which saved nothing. Give --resume to begin it again, or another --out."
        )


def _option(out: Path, saved_under: Place) -> str:
    return "--out" if saved_under == out else "--checkpoints"


def _require_run(checkpoint: Checkpoint) -> None:
    """Raises InputError for weights that were imported and for what a user's own program saved: no run saved them."""
    if checkpoint.point.of_own_program:
        raise InputError(
            f"{checkpoint.directory}: a program of your own saved it, and no run of shardwright train, so there is none to go on "
            f"with. Give another --out."
        )
    metadata = checkpoint.point.metadata
    if METADATA in metadata and "steps" not in metadata:
        out = checkpoint.directory.parent.parent
        raise InputError(
            f"{checkpoint.directory} is imported weights, and no run to go on with. Begin one with --weights {out}, and give "
            f"another --out."
        )
