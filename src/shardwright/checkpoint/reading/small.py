"""Reads of small tensors: all layers of one at once, since its boxes lie in pieces of the same bytes."""

from __future__ import annotations

from collections import OrderedDict
from math import prod

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.reading.opened import Checkpoint
from shardwright.core.boxes.box import Box

SMALL_BYTES = 16 << 20
KEPT_BYTES = 256 << 20
"""Of the small tensors that were read last, which are in memory: a folder has a layer's tensors one after the other."""


class Boxes:
    """Boxes of a checkpoint's tensors, in opaque elements. Those of a small tensor are read from all of it, which is read once."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._kept: OrderedDict[str, np.ndarray] = OrderedDict()

    def read(self, name: str, box: Box) -> np.ndarray:
        """Raises DamagedError, CheckpointError."""
        info = self._checkpoint.tensors[name]
        if prod(info.shape) * DTYPES[info.dtype].num_bytes > SMALL_BYTES:
            return self._checkpoint.read_box(name, box, raw=True)
        if name not in self._kept:
            self._kept[name] = self._checkpoint.read_box(name, raw=True)
            while sum(array.nbytes for array in self._kept.values()) > KEPT_BYTES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(name)
        return self._kept[name][(*box.slices, ...)]
