"""The checkpoint store: boxes of tensors in safetensors files and a manifest. A checkpoint is complete or absent.

inspection.py  what a checkpoint holds, and whether it is intact, for the command line

    save_checkpoint(out, point, tensors, boxes)       one process
    saving, join_save, write_part, commit             several processes
    latest(out), open_checkpoint(directory)           any box of any tensor, on any layout, verified
    describe(directory), verify(directory)            what it holds, whether it is intact

Format: docs/checkpoint.md.
"""

from shardwright.checkpoint.folder.directory import committed, set_aside
from shardwright.checkpoint.folder.names import step_of
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import Manifest, RunPoint, TensorInfo
from shardwright.checkpoint.inspection import describe, verify
from shardwright.checkpoint.reading.opened import Checkpoint, Latest, latest, open_checkpoint, open_newest, open_step
from shardwright.checkpoint.retention.rules import Keep, Retention
from shardwright.checkpoint.writing.data_file import OwnedBox
from shardwright.checkpoint.writing.save import Save, commit, join_save, save_checkpoint, saving, write_part

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedError",
    "Keep",
    "Latest",
    "Manifest",
    "OwnedBox",
    "Retention",
    "RunPoint",
    "Save",
    "TensorInfo",
    "commit",
    "committed",
    "describe",
    "join_save",
    "latest",
    "open_checkpoint",
    "open_newest",
    "open_step",
    "save_checkpoint",
    "saving",
    "set_aside",
    "step_of",
    "verify",
    "write_part",
]
