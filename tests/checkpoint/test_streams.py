"""Random boxes of several processes, read as random other boxes: bit for bit, each needed piece once, and no other byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import (
    DamagedError,
    OwnedBox,
    TensorInfo,
    commit,
    join_save,
    open_checkpoint,
    saving,
    write_part,
)
from shardwright.checkpoint.reading import streams
from shardwright.checkpoint.reading.streams import bytes_to_read
from shardwright.checkpoint.writing import data_file
from shardwright.core.boxes.box import Box
from shardwright.storage.files import open_regular
from tests.checkpoint.editing import flip, part_of
from tests.checkpoint.states import DTYPES, point, random_array, random_partition, same_bits


class Recorded:
    """A data file that counts how often each of its bytes is read."""

    counts: Mapping[str, np.ndarray] = {}

    def __init__(self, path: Path) -> None:
        self.file, self.count = open_regular(path), Recorded.counts[path.name]

    def seek(self, at: int) -> int:
        return self.file.seek(at)

    def readinto(self, data: memoryview) -> int:
        at, num = self.file.tell(), self.file.readinto(data) or 0
        self.count[at : at + num] += 1
        return num

    def close(self) -> None:
        self.file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A saved array: where each byte of its boxes is, read from the part files by the safetensors library."""

    directory: Path
    array: np.ndarray
    piece_bytes: int
    stored: Sequence[tuple[str, int, Box]]

    def needed(self, targets: Sequence[Box]) -> dict[str, np.ndarray]:
        """By brute force, how often each byte of each data file must be read: once where its piece has an element of a target."""
        width = self.array.dtype.itemsize
        wanted = np.zeros(self.array.shape, bool)
        for target in targets:
            wanted[target.slices] = True
        needed = {path.name: np.zeros(path.stat().st_size, int) for path in self.directory.glob("*.safetensors")}
        for file, offset, box in self.stored:
            elements = np.repeat(wanted[box.slices].reshape(-1), width)
            for start in range(0, len(elements), self.piece_bytes):
                piece = elements[start : start + self.piece_bytes]
                needed[file][offset + start : offset + start + len(piece)] = piece.any()
        return needed


def random_saved(rng: np.random.Generator, out: Path) -> Saved:
    """An array in a random partition, of which 1 to 4 processes own any boxes, in files and pieces of any size."""
    shape = rng.integers(1, 14, int(rng.integers(0, 4))).tolist()
    array = random_array(rng, shape, DTYPES[int(rng.integers(len(DTYPES)))])
    info = TensorInfo(name="w", shape=array.shape, dtype=array.dtype.name)
    boxes = random_partition(rng, Box.whole(array.shape), int(rng.integers(0, 9)))
    num_processes, piece_bytes = int(rng.integers(1, 5)), int(rng.integers(1, 65))
    owners = rng.integers(0, num_processes, len(boxes)).tolist()
    with saving(out, 10) as save:
        for process in range(num_processes):
            owned = [
                OwnedBox(name="w", box=box, array=array[box.slices])
                for box, owner in zip(boxes, owners, strict=True)
                if owner == process
            ]
            joining = join_save(out, 10, save.name)
            most = int(rng.choice([1, 64, 1 << 20]))
            write_part(joining, [info], owned, process=process, max_file_bytes=most, piece_bytes=piece_bytes)
        directory = commit(save, point(), num_processes=num_processes)
    stored = [
        (data_of(process, box["file"]), box["offset"], Box(tuple(box["start"]), tuple(box["stop"])))
        for process in range(num_processes)
        for box in part_of(directory, process)["boxes"]
    ]
    return Saved(directory=directory, array=array, piece_bytes=piece_bytes, stored=stored)


def data_of(process: int, number: int) -> str:
    return f"boxes-{process:05d}-{number:05d}.safetensors"


def random_targets(rng: np.random.Generator, shape: Sequence[int]) -> list[Box]:
    """Several boxes that may overlap, be equal or be empty; or a partition; or all; or none."""
    kind = rng.integers(5)
    if kind == 0:
        return random_partition(rng, Box.whole(shape), int(rng.integers(0, 5)))
    if kind == 1:
        return [Box.whole(shape)] * int(rng.integers(1, 3))
    targets: list[Box] = []
    for _ in range(int(rng.integers(0, 4))):
        start = [int(rng.integers(0, size + 1)) for size in shape]
        stop = [int(rng.integers(at, size + 1)) for at, size in zip(start, shape, strict=True)]
        targets += [Box(tuple(start), tuple(stop))] * (2 if kind == 2 else 1)
    return targets


@pytest.mark.parametrize("seed", range(8))
def test_each_piece_that_has_an_element_of_a_target_is_read_once_and_no_other(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(streams, "open_regular", Recorded)
    damaged = spared = 0
    for number in range(12):
        monkeypatch.setattr(data_file, "CHUNK_BYTES", int(rng.choice([1, 7, 64, 8 << 20])))
        saved = random_saved(rng, tmp_path / str(number))
        checkpoint = open_checkpoint(saved.directory)
        for _ in range(6):
            monkeypatch.setattr(streams, "BLOCK_BYTES", int(rng.choice([1, 16, 100, 8 << 20])))
            targets = random_targets(rng, saved.array.shape)
            needed = saved.needed(targets)
            Recorded.counts = {name: np.zeros_like(counts) for name, counts in needed.items()}
            for target, found in zip(targets, checkpoint.read_boxes("w", targets), strict=True):
                assert same_bits(found, saved.array[target.slices])
            assert all((Recorded.counts[name] == counts).all() for name, counts in needed.items())
            planned = [
                bytes_to_read(box, saved.array.dtype.itemsize, saved.piece_bytes, targets) for *_, box in saved.stored
            ]
            assert sum(planned) == sum(counts.sum() for counts in needed.values())
            # A flipped bit is found if and only if its piece is read.
            file, offset, box = saved.stored[int(rng.integers(len(saved.stored)))]
            byte = offset + int(rng.integers(box.size * saved.array.dtype.itemsize))
            flip(saved.directory / file, byte, bit := int(rng.integers(8)))
            if needed[file][byte]:
                with pytest.raises(DamagedError, match=f"{file}: tensor 'w', box .* do not match their digest"):
                    checkpoint.read_boxes("w", targets)
                damaged += 1
            else:
                for target, found in zip(targets, checkpoint.read_boxes("w", targets), strict=True):
                    assert same_bits(found, saved.array[target.slices])
                spared += 1
            flip(saved.directory / file, byte, bit)
    assert damaged > 10
    assert spared > 10


@pytest.mark.parametrize("seed", range(4))
def test_what_a_read_of_regions_reports_is_what_it_reads(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(100 + seed)
    monkeypatch.setattr(streams, "BLOCK_BYTES", 40)
    for number in range(10):
        saved = random_saved(rng, tmp_path / str(number))
        checkpoint = open_checkpoint(saved.directory)
        width = saved.array.dtype.itemsize
        boxes = [box for process in range(len(checkpoint.parts)) for box in checkpoint.parts.stored(process)]
        for _ in range(5):
            targets = random_targets(rng, saved.array.shape)
            needed = sum(counts.sum() for counts in saved.needed(targets).values())
            pairs = [(box, np.zeros(box.shape, f"<u{width}")) for box in targets]
            read = [streams.read_regions(saved.directory, box, saved.piece_bytes, pairs) for box in boxes]
            assert read == [bytes_to_read(box.box, width, saved.piece_bytes, targets) for box in boxes]
            assert sum(read) == needed


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        # Rows of 10 bytes in pieces of 12: the first element of row 1 is in the first piece, the last of row 2 in the third.
        ([Box((1, 0), (2, 1)), Box((2, 9), (3, 10))], [0, 2]),
        ([Box((1, 0), (2, 1)), Box((2, 2), (3, 3))], [0, 1]),
        ([Box((1, 2), (3, 4))], [1]),
        ([Box((1, 1), (3, 4))], [0, 1]),
        ([Box((0, 0), (1, 1)), Box((3, 9), (4, 10))], [0, 3]),
        ([Box((0, 0), (4, 1))], [0, 1, 2]),
        ([Box((0, 9), (4, 10))], [0, 1, 2, 3]),
        ([], []),
    ],
)
def test_rows_that_are_shorter_than_a_piece(targets: list[Box], expected: list[int], tmp_path: Path) -> None:
    array = np.arange(40, dtype=np.uint8).reshape(4, 10)
    info, whole = TensorInfo(name="w", shape=(4, 10), dtype="uint8"), Box.whole((4, 10))
    with saving(tmp_path, 10) as save:
        write_part(save, [info], [OwnedBox(name="w", box=whole, array=array)], piece_bytes=12)
        directory = commit(save, point())
    checkpoint = open_checkpoint(directory)
    num_bytes = sum(12 if piece < 3 else 4 for piece in expected)
    assert bytes_to_read(whole, 1, 12, targets) == num_bytes
    pairs = [(box, np.zeros(box.shape, np.uint8)) for box in targets]
    assert streams.read_regions(directory, checkpoint.parts.stored(0)[0], 12, pairs) == num_bytes
    assert all((found == array[box.slices]).all() for box, found in pairs)


def test_a_box_is_verified_piece_by_piece_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a box of 64 pieces, a block of rows is read in full, a block of columns from every row, and never more than that."""
    monkeypatch.setattr(streams, "BLOCK_BYTES", 1 << 12)
    array = np.arange(1 << 14, dtype=np.float32).reshape(64, 256)
    info = TensorInfo(name="w", shape=array.shape, dtype="float32")
    with saving(tmp_path, 10) as save:
        write_part(save, [info], [OwnedBox(name="w", box=Box.whole(array.shape), array=array)], piece_bytes=1 << 10)
        directory = commit(save, point())
    checkpoint = open_checkpoint(directory)
    largest = 0
    original = streams.empty

    def counted(shape: tuple[int, ...], dtype: np.dtype, place: str) -> np.ndarray:
        nonlocal largest
        largest = max(largest, prod(shape) * dtype.itemsize)
        return original(shape, dtype, place)

    monkeypatch.setattr(streams, "empty", counted)
    for box in (Box((0, 0), (64, 1)), Box((3, 7), (64, 9)), Box((5, 0), (6, 256)), Box.whole((64, 256))):
        assert same_bits(checkpoint.read_box("w", box), array[box.slices])
        rows = box.shape[0]
        assert bytes_to_read(Box.whole((64, 256)), 4, 1 << 10, [box]) == rows << 10
    assert 0 < largest <= 1 << 12
