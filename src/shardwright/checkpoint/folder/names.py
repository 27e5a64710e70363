"""Names of checkpoints in a run's folder.

OUT/checkpoints/step-00000010                    a checkpoint: it gets this name when it is complete
OUT/checkpoints/step-00000020.saving-5f0c9a17    a save that is running, or was killed
OUT/checkpoints/step-00000005.deleting-81d2e044  a deletion that is running, or was killed
OUT/checkpoints/step-00000020.damaged-9d12c0b7   a checkpoint proven damaged and skipped; never deleted automatically
OUT/checkpoints/step-00000020.set-aside-c1e80a3f a checkpoint of a later step than --resume-from; never deleted automatically
OUT/checkpoints/.lock                            locked by the process that saves; the kernel releases it

In an object store they are those of ``in_store.py``.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.storage.url import Place

STEP = re.compile(r"step-([0-9]{8,})")
LEFTOVER = re.compile(r"step-([0-9]{8,})\.(saving|deleting)-[0-9a-f]{8}")
SET_ASIDE = re.compile(r"step-([0-9]{8,})\.(damaged|set-aside)-[0-9a-f]{8}")
LOCK = ".lock"
CHECKPOINTS = "checkpoints"
OF_OTHERS = {
    ".metadata": ("torch.distributed.checkpoint", "dcp"),
    "_CHECKPOINT_METADATA": ("Orbax", "orbax"),
    "_METADATA": ("Orbax", "orbax"),
    "model.safetensors.index.json": ("Hugging Face", "huggingface"),
    "model.safetensors": ("Hugging Face", "huggingface"),
}
"""A file by which a folder of another program is known: the program, and what ``ckpt import`` calls it."""


def checkpoints_directory(out: Place) -> Place:
    return out / CHECKPOINTS


def step_directory(out: Place, step: int) -> Place:
    return checkpoints_directory(out) / f"step-{step:08d}"


def step_of(directory: Place) -> int | None:
    """The step in the name of a checkpoint directory, or None for another name."""
    match = STEP.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def no_checkpoint(directory: Place) -> CheckpointError:
    """The error of a folder that has no checkpoint of ours; it says so if the files of another program are there."""
    if isinstance(directory, Path):
        for file, (program, word) in OF_OTHERS.items():
            with suppress(OSError, ValueError):
                if (directory / file).is_file():
                    return CheckpointError(
                        f"{directory}: this is a folder of {program}, and no checkpoint of ours. shardwright ckpt import {word} "
                        f"FOLDER --out OUT makes one of it."
                    )
    return CheckpointError(
        f"{directory}: there is no checkpoint here. Give the --out of a run, or the directory of one step, "
        f"as in OUT/checkpoints/step-00000010."
    )


def saved_before(final: Place) -> CheckpointError:
    """The error of a step that exists."""
    return CheckpointError(
        f"{final}: this step was saved before, and a checkpoint is never overwritten. "
        f"Move it away, or give this one a folder of its own (--out of a run)."
    )
