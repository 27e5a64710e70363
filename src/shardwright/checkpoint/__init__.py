"""The checkpoint store: boxes of tensors in safetensors files and a manifest. A checkpoint is complete or absent.

directory.py   names of checkpoints in a run's folder, and who may write there
save.py        a save: every process writes its boxes, one commits
data_file.py   the file in which boxes are written
merging.py     what all processes have written becomes the index and the manifest
opened.py      an open checkpoint: any box of any tensor
files.py       the files of an open checkpoint against their digests
streams.py     reads of regions of stored boxes, piece by piece
expected.py    the tensors that a program expects against those of a checkpoint
inspection.py  what a checkpoint holds, and whether it is intact, for the command line
retention.py   which old checkpoints are deleted
file_lock.py   an exclusive lock on a file

    save_checkpoint(out, point, tensors, boxes)       one process
    saving, join_save, write_part, commit             several processes
    latest(out), open_checkpoint(directory)           any box of any tensor, on any layout, verified
    describe(directory), verify(directory)            what it holds, whether it is intact

Format: docs/checkpoint.md.
"""

from shardwright.checkpoint.data_file import OwnedBox
from shardwright.checkpoint.directory import committed, set_aside, step_of
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import Manifest, RunPoint, TensorInfo
from shardwright.checkpoint.inspection import describe, verify
from shardwright.checkpoint.opened import Checkpoint, Latest, latest, open_checkpoint, open_newest
from shardwright.checkpoint.save import Save, commit, join_save, save_checkpoint, saving, write_part

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "DamagedError",
    "Latest",
    "Manifest",
    "OwnedBox",
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
    "save_checkpoint",
    "saving",
    "set_aside",
    "step_of",
    "verify",
    "write_part",
]
