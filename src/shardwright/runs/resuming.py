"""Whether a run begins or goes on, and from which checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwright.checkpoint import Checkpoint, latest
from shardwright.core.errors import InputError
from shardwright.core.run import Listener, RunOptions
from shardwright.runs.journal import FILE_NAME


def checkpoint_to_resume(options: RunOptions, told: Mapping[str, Any], shown: Listener) -> Checkpoint | None:
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
