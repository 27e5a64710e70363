"""Whether boxes cover a tensor exactly once: the fast answer for grids against the core's for all boxes, and by counting."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError
from shardwright.checkpoint.format.index import BoxTable, check_cover, is_grid
from shardwright.core.boxes.box import Box
from shardwright.core.boxes.coverage import coverage
from tests.checkpoint.states import random_partition


def random_grid(rng: np.random.Generator, shape: Sequence[int]) -> list[Box]:
    """All cells of a grid, in random order."""
    lines = [
        sorted({0, size, *rng.integers(0, size + 1, int(rng.integers(0, 4))).tolist()}) if size else []
        for size in shape
    ]
    cells = product(*(list(pairwise(dim)) for dim in lines))
    boxes = [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in cells]
    return [boxes[number] for number in rng.permutation(len(boxes))]


def spoiled(rng: np.random.Generator, boxes: list[Box], shape: Sequence[int], kind: str) -> list[Box]:
    """Boxes with one fault, which may happen to be none."""
    if not boxes:
        return boxes
    at, other = (int(rng.integers(len(boxes))) for _ in range(2))
    box = boxes[at]
    if kind == "hole":
        return boxes[:at] + boxes[at + 1 :]
    if kind == "twice":
        return [*boxes, box]
    if kind == "instead of another":
        return [*boxes[:other], box, *boxes[other + 1 :]]
    if kind == "stop of another" and shape:
        dim = int(rng.integers(len(shape)))
        stop = boxes[other].stop[dim]
        if stop > box.start[dim]:
            longer = Box(box.start, (*box.stop[:dim], stop, *box.stop[dim + 1 :]))
            return [*boxes[:at], longer, *boxes[at + 1 :]]
    if kind == "moved" and shape:
        dim = int(rng.integers(len(shape)))
        start = box.start[dim] - 1 if rng.random() < 0.5 else box.start[dim] + 1
        if 0 <= start < box.stop[dim]:
            moved = Box((*box.start[:dim], start, *box.start[dim + 1 :]), box.stop)
            return [*boxes[:at], moved, *boxes[at + 1 :]]
    return boxes


def table_of(boxes: Sequence[Box], num_dims: int) -> BoxTable:
    numbers = np.zeros(len(boxes), np.int32)
    starts = np.array([box.start for box in boxes], np.int64).reshape(len(boxes), num_dims)
    stops = np.array([box.stop for box in boxes], np.int64).reshape(len(boxes), num_dims)
    return BoxTable.sorted(starts, stops, numbers, numbers)


def covered_once(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """By counting the boxes of every index."""
    counts = np.zeros(tuple(shape), int)
    for box in boxes:
        counts[box.slices] += 1
    return bool((counts == 1).all())


@pytest.mark.parametrize("kind", ["", "hole", "twice", "instead of another", "stop of another", "moved"])
def test_a_grid_is_found_and_nothing_else_is_taken_for_one(kind: str) -> None:
    rng = np.random.default_rng(len(kind))
    outcomes: set[bool] = set()
    for _ in range(400):
        shape = rng.integers(0 if rng.random() < 0.2 else 1, 6, int(rng.integers(0, 4))).tolist()
        boxes = spoiled(rng, random_grid(rng, shape), shape, kind)
        agrees(boxes, shape)
        table = table_of(boxes, len(shape))
        if not kind and boxes:
            assert is_grid(shape, table.starts, table.stops)
        outcomes.add(covered_once(boxes, shape))
    assert outcomes == ({True, False} if kind else {True})


def test_partitions_that_are_no_grids() -> None:
    rng = np.random.default_rng(0)
    grids = 0
    for _ in range(400):
        shape = rng.integers(1, 7, int(rng.integers(0, 4))).tolist()
        boxes = random_partition(rng, Box.whole(shape), int(rng.integers(0, 8)))
        table = table_of(boxes, len(shape))
        grids += is_grid(shape, table.starts, table.stops)
        agrees(boxes, shape)
        agrees(spoiled(rng, boxes, shape, str(rng.choice(["hole", "twice", "moved"]))), shape)
    assert 50 < grids < 350


def agrees(boxes: Sequence[Box], shape: Sequence[int]) -> None:
    """The table, the core and the count say the same."""
    table = table_of(boxes, len(shape))
    exact = covered_once(boxes, shape)
    assert coverage(boxes, shape).exact == exact
    assert exact or not is_grid(shape, table.starts, table.stops)
    if exact:
        check_cover(Path("here"), "w", shape, table)
        return
    with pytest.raises(CheckpointError) as caught:
        check_cover(Path("here"), "w", shape, table)
    start = f"here: tensor 'w' of shape {tuple(shape)} is not covered exactly once by its boxes: "
    assert str(caught.value).startswith(start)


def test_boxes_are_found_that_overlap_a_target() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        shape = rng.integers(1, 7, int(rng.integers(0, 4))).tolist()
        table = table_of(random_partition(rng, Box.whole(shape), 6), len(shape))
        assert list(table.boxes()) == [table.box(number) for number in range(len(table))] == sorted(table.boxes())
        start = [int(rng.integers(0, size + 1)) for size in shape]
        stop = [int(rng.integers(at, size + 1)) for at, size in zip(start, shape, strict=True)]
        target = Box(tuple(start), tuple(stop))
        expected = [number for number, box in enumerate(table.boxes()) if box.intersect(target) is not None]
        assert table.overlapping(target).tolist() == expected
