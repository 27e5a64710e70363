"""A commit merges the parts of hundreds of processes, and opening reads them, in seconds and in little memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from shardwright.checkpoint import CheckpointError, TensorInfo, commit, open_checkpoint, saving
from shardwright.checkpoint.format.header import safetensors_header
from shardwright.checkpoint.format.part import (
    StoredBox,
    StoredFile,
    box_bytes,
    data_name,
    declared_name,
    header_tensors,
    part_bytes,
    part_name,
)
from shardwright.checkpoint.format.pieces import PIECE_BYTES
from shardwright.checkpoint.writing.merging import declared_bytes
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import point
from tests.fuzz.running import memory_bound

NUM_PROCESSES = 256
LAYERS, COLUMNS = 32, 4096
MOST_S = 10
"""CPU time of a commit and of an open: some ten times what they take."""


def tensors() -> list[TensorInfo]:
    """Sixty stacks of layers, sharded over all processes: 8 GiB each."""
    shape = (LAYERS, 64 * NUM_PROCESSES, COLUMNS)
    return [TensorInfo(name=f"layers.w{number}", shape=shape, dtype="float32") for number in range(60)]


def write_part_without_data(folder: Path, infos: list[TensorInfo], process: int) -> None:
    """What a process writes, with data files that have no blocks on the disk and digests of zeros."""
    boxes = [(info, Box((0, 64 * process, 0), (LAYERS, 64 * (process + 1), COLUMNS))) for info in infos]
    header = safetensors_header(header_tensors(boxes), {"shardwright": "2", "step": "10"})
    offset = len(header)
    rows: list[tuple[int, int, StoredBox]] = []
    for number, (info, box) in enumerate(boxes):
        size = box_bytes(info, box)
        digests = np.zeros((-(-size // PIECE_BYTES), 16), np.uint8)
        stored = StoredBox(info=info, box=box, file="", offset=offset, num_bytes=size, digests=digests)
        rows.append((number, 0, stored))
        offset += size
    digest = xxhash.xxh3_128_digest(header)
    file = StoredFile(name="", num_bytes=offset, header_bytes=len(header), header_digest=digest)
    (folder / declared_name(process)).write_bytes(declared_bytes(infos))
    (folder / part_name(process)).write_bytes(part_bytes([file], rows, PIECE_BYTES))
    path = folder / data_name(process, 0)
    path.write_bytes(header)
    os.truncate(path, offset)


@contextmanager
def quick() -> Iterator[None]:
    began = time.process_time()
    with memory_bound():
        yield
    assert time.process_time() - began < MOST_S


def test_a_commit_and_an_open_of_many_processes(tmp_path: Path) -> None:
    infos = tensors()
    with saving(tmp_path, 10) as save:
        for process in range(NUM_PROCESSES):
            write_part_without_data(save.directory, infos, process)
        with quick():
            directory = commit(save, point(), num_processes=NUM_PROCESSES)
    with quick():
        checkpoint = open_checkpoint(directory)
    assert checkpoint.num_bytes > 60 << 33
    assert [len(checkpoint.boxes(info.name)) for info in infos] == [NUM_PROCESSES] * 60
    # The index is what every process reads.
    assert (directory / "boxes.index").stat().st_size < 60 * NUM_PROCESSES * 60
    with quick():
        opened = open_checkpoint(directory, all_files=False)
        with pytest.raises(
            CheckpointError, match=r"boxes-00200-00000\.safetensors: tensor 'layers.w7', .* do not match"
        ):
            opened.read_box("layers.w7", Box((3, 64 * 200 + 1, 5), (4, 64 * 200 + 2, 9)))
