"""The boxes in which a tensor is stored, as arrays of their corners."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardwright.core.boxes.box import Box


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """The stored boxes of one tensor, which cover it exactly once. ``starts`` and ``stops``: int64 (boxes, dims)."""

    starts: np.ndarray
    stops: np.ndarray
    width: int
    """Bytes of an element."""
    piece_bytes: int

    def box(self, number: int) -> Box:
        return Box(tuple(self.starts[number].tolist()), tuple(self.stops[number].tolist()))
