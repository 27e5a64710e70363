"""The order of rows, and the rows of a step.

All rows of all steps are one endless stream. Row k of the stream is a function of (seed, k). Each epoch has each row
of the corpus once, in its own order. Step s reads rows s * batch to (s + 1) * batch. So the only
position to save is the index of the next row, and the batch size may change between two runs.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from shardwright.core.resolution.row_order import IN_ORDER
from shardwright.data.packing import ROW_FIELDS, Row, Rows, reordered

if TYPE_CHECKING:
    import grain


_IMPORTING = threading.Lock()
"""One thread imports grain: what it hides and disables meanwhile is the process's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The requested rows of a step, [rows, length] per field of ``ROW_FIELDS``.

    ``first_row`` is the global index of the step's first row. ``next_row`` is that of the next step's first row: the
    position to save after this step.
    """

    first_row: int
    next_row: int
    arrays: Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Batches:
    """The steps of a run: ``batch`` rows each, from global row ``start_row`` on, in the order that ``seed`` gives.

    ``chunks``: the order of the equal chunks of each row in the arrays, by their numbers in the text.

    Step 0 is the first step of this object. To resume, pass the saved ``next_row`` as ``start_row``.
    """

    rows: Rows
    batch: int
    seed: int
    start_row: int = 0
    chunks: tuple[int, ...] = IN_ORDER

    def __post_init__(self) -> None:
        assert self.batch > 0, self.batch
        assert self.start_row >= 0, self.start_row
        assert self.rows.length % len(self.chunks) == 0, (self.rows.length, self.chunks)

    def read(self, step: int, offsets: Sequence[int] | None = None) -> Batch:
        """The rows of a step, in the calling thread.

        ``offsets`` are counted from the step's first row (0 <= offset < batch); None: all. A process passes
        the offsets of its own devices; no other row is read.
        """
        return self._read(stream(self.rows, self.seed), step, offsets)

    @contextmanager
    def prefetched(self, offsets: Sequence[int] | None = None, *, depth: int = 2) -> Iterator[Iterator[Batch]]:
        """An endless iterator over the steps from 0 on. A thread prefetches ``depth`` steps, and ends with the block.

        An exception in the thread is raised by ``next``.
        """
        ordered, grain = stream(self.rows, self.seed), _grain()
        steps = grain.MapDataset.range(sys.maxsize).map(lambda step: self._read(ordered, step, offsets))
        batches = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=depth)))
        try:
            yield batches
        finally:
            batches.close()

    def _read(self, ordered: grain.MapDataset[Row], step: int, offsets: Sequence[int] | None) -> Batch:
        first_row = self.start_row + step * self.batch
        offsets = range(self.batch) if offsets is None else offsets
        assert all(0 <= offset < self.batch for offset in offsets), (offsets, self.batch)
        arrays = {name: np.empty((len(offsets), self.rows.length), dtype) for name, dtype in ROW_FIELDS.items()}
        for i, offset in enumerate(offsets):
            row = ordered[first_row + offset]
            assert row is not None
            for name, values in reordered(row, self.chunks).items():
                arrays[name][i] = values
        return Batch(first_row=first_row, next_row=first_row + self.batch, arrays=arrays)


def stream(rows: Rows, seed: int) -> grain.MapDataset[Row]:
    """Rows in the order of a seed, without end: ``stream(rows, seed)[k]`` is row k of every run with that seed."""
    # Grain shuffles epoch e by seed + e. Seeds s and s + 1 would have the same orders one epoch apart, hence the digest.
    digest = hashlib.blake2b(str(seed).encode(), digest_size=4, person=b"shardwright rows").digest()
    return _grain().MapDataset.source(rows).shuffle(seed=int.from_bytes(digest, "little")).repeat()


def _grain() -> ModuleType:
    """grain, imported when it is needed: to plan or to check data takes none of it.

    It imports JAX where that is installed, in a second of each rank of PyTorch, to treat JAX's trees; rows are none. So JAX is
    hidden from it, where nobody has imported it yet. Without JAX, grain logs an irrelevant warning about a profiler.
    """
    with _IMPORTING:
        disabled, hidden = logging.root.manager.disable, "jax" not in sys.modules
        logging.disable(logging.WARNING)
        try:
            if hidden:
                sys.modules["jax"] = None  # pyright: ignore[reportArgumentType]  # as Python's documentation has it
            return importlib.import_module("grain")
        finally:
            logging.disable(disabled)
            if hidden:
                del sys.modules["jax"]
