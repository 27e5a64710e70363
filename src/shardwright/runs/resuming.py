"""Whether a run begins or goes on, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint import (
    Checkpoint,
    CheckpointError,
    DamagedError,
    committed,
    latest,
    open_checkpoint,
    set_aside,
    step_of,
)
from shardwright.core.findings.errors import InputError
from shardwright.training.options import METRICS_FILE, Listener, RunOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """The checkpoint to go on from, or None for a run that begins; the newer ones that are proven damaged, and by what."""

    checkpoint: Checkpoint | None
    passed_over: Mapping[Path, str]

    @property
    def step(self) -> int | None:
        return None if self.checkpoint is None else self.checkpoint.point.step


def beginning(options: RunOptions, fingerprint: Mapping[str, Any], shown: Listener) -> Beginning:
    """Where a run begins. Looks at no element of a checkpoint, and changes nothing. Raises InputError where it cannot."""
    if options.resume_from is not None:
        found = Beginning(checkpoint=_of_step(options.out, options.resume_from), passed_over={})
    elif options.resume:
        found = _newest(options, {}, shown)
    else:
        _require_no_run(options.out)
        return Beginning(checkpoint=None, passed_over={})
    if found.checkpoint is not None:
        _require_same_run(found.checkpoint, fingerprint)
    return found


def older(
    options: RunOptions, before: Beginning, damage: str, fingerprint: Mapping[str, Any], shown: Listener
) -> Beginning:
    """The next older checkpoint, where elements of the one before are damaged. Raises InputError where there is none."""
    assert before.checkpoint is not None
    if options.resume_from is not None:
        raise InputError(
            f"--resume-from {options.resume_from}: {damage} Nothing was changed. Give --resume instead, which takes the "
            f"newest whole one, or another step."
        )
    directory = before.checkpoint.directory
    shown.say(f"passed over a checkpoint that is not whole: {damage}")
    found = _newest(options, {**before.passed_over, directory: damage}, shown)
    assert found.checkpoint is not None
    _require_same_run(found.checkpoint, fingerprint)
    return found


def clear_the_way(options: RunOptions, first: int, passed_over: Mapping[Path, str], shown: Listener) -> None:
    """Give other names to what a run that goes on after ``first`` steps would meet when it saves: nothing is lost.

    That is what is proven damaged; and, only where a person asked to go back to a step, what was saved after it. By the
    process that holds the folder. Raises CheckpointError where something cannot be renamed.
    """
    for directory in passed_over:
        shown.say(f"kept beside, not whole: {set_aside(directory, 'damaged')}")
    if options.resume_from is None:
        return
    for directory in committed(options.out):
        if (step := step_of(directory)) is not None and step > first:
            shown.say(f"kept beside, of a later step than {first}: {set_aside(directory, 'set-aside')}")


def _newest(options: RunOptions, passed_over: Mapping[Path, str], shown: Listener) -> Beginning:
    """The newest checkpoint that opens as a whole one; None for a run that was ended before it saved any."""
    damaged = dict(passed_over)
    for directory in committed(options.out):
        if directory in damaged:
            continue
        try:
            return Beginning(checkpoint=open_checkpoint(directory), passed_over=damaged)
        except DamagedError as error:
            damaged[directory] = str(error)
            shown.say(f"passed over a checkpoint that is not whole: {error}")
        except CheckpointError as error:
            raise InputError(
                f"--resume: {error} Nothing proves that it is damaged, so it was not passed over. See why, or give the "
                f"step to go on from with --resume-from."
            ) from None
    if damaged:
        lines = "".join(f"\n  {error}" for error in damaged.values())
        raise InputError(
            f"--resume: there is no whole checkpoint under {options.out}, and nothing was changed. Restore one from a copy, or "
            f"begin anew with another --out.{lines}"
        )
    if not (options.out / METRICS_FILE).exists():
        raise InputError(
            f"--resume: there is no whole checkpoint under {options.out}. "
            f"Give the --out of the run to go on with, or leave --resume out."
        )
    # So that a job that is started again with one command goes on, however early it was ended.
    shown.say(f"the run in {options.out} saved nothing: it begins again")
    return Beginning(checkpoint=None, passed_over={})


def _of_step(out: Path, step: int) -> Checkpoint:
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
            f"--resume-from {step}: {error} Nothing was changed. Give --resume instead, which takes the newest whole one, "
            f"or another step."
        ) from None


def _require_no_run(out: Path) -> None:
    found = latest(out)
    if found.checkpoint is not None:
        raise InputError(f"{out} already holds a run. Give --resume to go on with it, or another --out for a new one.")
    if found.passed_over:
        raise InputError(f"{out} already holds a run, without a whole checkpoint to go on from. Give another --out.")
    if (out / METRICS_FILE).exists():
        raise InputError(
            f"{out} already holds a run, which saved nothing. Give --resume to begin it again, or another --out."
        )


def _require_same_run(checkpoint: Checkpoint, fingerprint: Mapping[str, Any]) -> None:
    before = checkpoint.point.metadata
    moved = [
        f"  {name}: was {before.get(name)!r}, is {value!r}"
        for name, value in fingerprint.items()
        if before.get(name) != value and name != "tokenizer"  # a path; what it made of the text is in "corpus"
    ]
    if moved:
        raise InputError(
            f"{checkpoint.directory} was saved by a run told otherwise; going on would be another run:\n"
            + "\n".join(moved)
            + "\nGive the same options, or another --out. The layout and the mesh may change."
        )
