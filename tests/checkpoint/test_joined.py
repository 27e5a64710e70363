"""Boxes of one process that follow each other along the first dim are stored as one, and files end before they grow too large."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import OwnedBox, TensorInfo, commit, open_checkpoint, saving, write_part
from shardwright.checkpoint.writing.data_file import JoinedBox, grouped, joined
from shardwright.core.boxes.box import Box
from tests.checkpoint.editing import data_of, part_of
from tests.checkpoint.states import point, random_partition

SHAPES = {"a": (9, 7), "b": (5,), "c": (), "d": (6, 3, 4)}


def random_boxes(rng: np.random.Generator) -> tuple[list[tuple[TensorInfo, OwnedBox]], dict[str, np.ndarray]]:
    """Tensors in random partitions, by many splits of a few rows and columns, of which one process owns most."""
    arrays = {name: rng.integers(0, 1 << 30, shape).astype(np.int32) for name, shape in SHAPES.items()}
    infos = {name: TensorInfo(name=name, shape=shape, dtype="int32") for name, shape in SHAPES.items()}
    pairs: list[tuple[TensorInfo, OwnedBox]] = []
    for name, array in arrays.items():
        for box in random_partition(rng, Box.whole(array.shape), int(rng.integers(0, 14))):
            if rng.random() < 0.9:
                pairs.append((infos[name], OwnedBox(name=name, box=box, array=array[box.slices])))
    return [pairs[number] for number in rng.permutation(len(pairs))], arrays


@pytest.mark.parametrize("seed", range(60))
def test_a_joined_box_has_the_bytes_of_its_members(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pairs, arrays = random_boxes(rng)
    max_bytes = int(rng.choice([1, 16, 60, 200, 10_000]))
    rows = joined(pairs, max_bytes)
    assert Counter((one.name, one.box) for row in rows for one in row.members) == Counter(
        (one.name, one.box) for _, one in pairs
    )
    for row in rows:
        expected = arrays[row.info.name][row.box.slices]
        found = b"".join(np.asarray(one.array).tobytes() for one in row.members)
        assert (found, row.num_bytes) == (expected.tobytes(), expected.nbytes)
        assert len(row.members) == 1 or row.num_bytes <= max_bytes
    # None is left apart that could be joined: by brute force over all pairs of results.
    for first in rows:
        for second in rows:
            if first.info is second.info and follows(first.box, second.box):
                assert first.num_bytes + np.asarray(second.members[0].array).nbytes > max_bytes
    order = [info.name for info, _ in pairs]
    places = [(order.index(row.info.name), row.box) for row in rows]
    assert places == sorted(places)


def follows(first: Box, second: Box) -> bool:
    """Whether both are a box together, the second one below the first."""
    return len(first.start) > 0 and (first.stop[0], first.start[1:], first.stop[1:]) == (
        second.start[0],
        second.start[1:],
        second.stop[1:],
    )


def test_layers_that_are_sharded_alike_are_one_box(tmp_path: Path) -> None:
    """As an engine passes them that keeps a weight for each layer: a box of each. In the file there is one."""
    rng = np.random.default_rng(0)
    array = rng.random((6, 4, 8), np.float32)
    info = TensorInfo(name="w", shape=array.shape, dtype="float32")
    boxes = [
        Box((layer, 0, column), (layer + 1, 4, column + 2)) for layer in (3, 0, 5, 1, 4, 2) for column in (0, 2, 4, 6)
    ]
    owned = [OwnedBox(name="w", box=box, array=array[box.slices]) for box in boxes]
    with saving(tmp_path, 10) as save:
        write_part(save, [info], owned)
        directory = commit(save, point())
    whole = [Box((0, 0, column), (6, 4, column + 2)) for column in (0, 2, 4, 6)]
    assert open_checkpoint(directory).boxes("w") == tuple(whole)
    data, stored = data_of(directory).read_bytes(), part_of(directory)["boxes"]
    ends = [box["offset"] for box in stored[1:]] + [len(data)]
    for box, row, end in zip(whole, stored, ends, strict=True):
        assert data[row["offset"] : end] == array[box.slices].tobytes()


def box_of(info: TensorInfo, size: int) -> JoinedBox:
    return JoinedBox(info=info, members=(OwnedBox(name=info.name, box=Box((0,), (size,)), array=np.empty(0)),))


def test_a_new_file_begins_before_one_grows_too_large() -> None:
    info = TensorInfo(name="w", shape=(100,), dtype="float32")
    wide = TensorInfo(name="wide", shape=(100,), dtype="float64")
    boxes = [box_of(one, size) for one, size in ((info, 10), (info, 10), (info, 5), (wide, 10), (info, 90), (info, 1))]

    def shown(files: Sequence[Sequence[JoinedBox]]) -> list[list[tuple[str, int]]]:
        return [[(box.info.name, box.box.size) for box in group] for group in files]

    files = shown(list(grouped(boxes, 100)))
    assert files == [[("wide", 10)], [("w", 10), ("w", 10), ("w", 5)], [("w", 90)], [("w", 1)]]
    assert [len(group) for group in grouped(boxes, 10_000, max_boxes=4)] == [4, 2]


def test_a_file_is_never_larger_than_said_except_for_one_box() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        info = TensorInfo(name="w", shape=(100,), dtype="int8")
        sizes = rng.integers(1, 60, int(rng.integers(1, 12))).tolist()
        most = int(rng.integers(1, 120))
        files = [[box.num_bytes for box in group] for group in grouped([box_of(info, size) for size in sizes], most)]
        assert [size for file in files for size in file] == sizes
        assert all(sum(file) <= most or len(file) == 1 for file in files)
        assert all(sum(first) + second[0] > most for first, second in pairwise(files))
