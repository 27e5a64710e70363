"""Holes and overlaps, against counting how often each cell of a small tensor is held."""

from random import Random

import numpy as np

from shardwright.core.boxes.box import Box
from shardwright.core.boxes.coverage import coverage, join

NO_LIMIT = 10**9


def counts(boxes: list[Box], shape: tuple[int, ...]) -> np.ndarray:
    held = np.zeros(shape, int)
    for box in boxes:
        held[box.slices] += 1
    return held


def random_box(random: Random, shape: tuple[int, ...]) -> Box:
    corners = [sorted((random.randint(0, size), random.randint(0, size))) for size in shape]
    return Box(tuple(a for a, _ in corners), tuple(b for _, b in corners))


def random_partition(random: Random, box: Box, splits: int) -> list[Box]:
    """``box`` split in two repeatedly, at random indices along random dims."""
    parts = [box]
    for _ in range(splits):
        part = parts.pop(random.randrange(len(parts)))
        dim = random.randrange(len(part.start))
        at = random.randint(part.start[dim], part.stop[dim])
        parts.append(Box(part.start, (*part.stop[:dim], at, *part.stop[dim + 1 :])))
        parts.append(Box((*part.start[:dim], at, *part.start[dim + 1 :]), part.stop))
    return parts


def test_any_boxes_against_counting() -> None:
    random = Random(0)
    for _ in range(1000):
        shape = tuple(random.randint(1, 7) for _ in range(random.randint(1, 3)))
        boxes = [random_box(random, shape) for _ in range(random.randint(0, 7))]
        found, expected = coverage(boxes, shape, limit=NO_LIMIT), counts(boxes, shape)
        assert np.array_equal(counts(list(found.holes), shape) == 1, expected == 0)
        seen = np.zeros(shape, int)
        for overlap in found.overlaps:
            assert all(boxes[index].contains(overlap.region) for index in overlap.indices)
            assert (expected[overlap.region.slices] == len(overlap.indices)).all()
            seen[overlap.region.slices] += 1
        assert np.array_equal(seen == 1, expected > 1)
        assert seen.max() <= 1
        assert found.exact == bool((expected == 1).all())


def test_ragged_partitions_are_exact_and_a_lost_or_doubled_box_is_named() -> None:
    random = Random(1)
    for _ in range(200):
        shape = tuple(random.randint(4, 40) for _ in range(random.randint(1, 4)))
        boxes = [box for box in random_partition(random, Box.whole(shape), splits=30) if box.size]
        random.shuffle(boxes)
        assert coverage(boxes, shape).exact
        lost, *rest = boxes
        assert coverage(rest, shape).problems() == (f"no box holds {lost}",)
        doubled = coverage([*boxes, lost], shape)
        assert doubled.problems() == (f"boxes 0, {len(boxes)} all hold {lost}",)


def test_a_box_that_exceeds_the_shape_is_named_and_its_part_inside_counts() -> None:
    found = coverage([Box((0, 0), (4, 9)), Box((4, 0), (6, 8)), Box((7, 7), (9, 9))], (6, 8))
    assert (found.holes, found.overlaps, found.outside, found.exact) == ((), (), (0, 2), False)
    assert found.problems() == ("box 0 exceeds the shape", "box 2 exceeds the shape")


def test_scalars_and_tensors_without_elements() -> None:
    scalar = Box((), ())
    assert coverage([scalar], ()).exact
    assert coverage([], ()).holes == (scalar,)
    assert coverage([scalar, scalar], ()).overlaps[0].indices == (0, 1)
    assert coverage([], (0, 4)).exact
    assert coverage([Box((0, 0), (0, 4))], (0, 4)).exact
    assert coverage([Box((0,), (8,)), Box((3,), (3,))], (8,)).exact


def test_thousands_of_boxes_of_a_large_tensor() -> None:
    step = (1 << 40) // 64
    boxes = [
        Box((i * step, j * 125), ((i + 1) * step, (j + 1) * 125)) for i in range(64) for j in range(64)
    ]  # fmt: skip
    shape = (1 << 40, 8000)
    Random(2).shuffle(boxes)
    assert coverage(boxes, shape).exact
    hole = boxes.pop()
    shifted = Box((boxes[0].start[0], boxes[0].start[1]), (boxes[0].stop[0] - 1, boxes[0].stop[1]))
    assert set(coverage([shifted, *boxes[1:]], shape).holes) == {
        hole,
        Box((shifted.stop[0], shifted.start[1]), boxes[0].stop),
    }


def test_the_search_stops_at_its_limit_and_reports_it() -> None:
    concentric = [Box((i, i), (4000 - i, 4000 - i)) for i in range(1500)]
    found = coverage(concentric, (4000, 4000))
    assert 1 <= len(found.overlaps) <= 100
    assert found.more
    assert not found.exact
    assert found.problems()[-1] == "and more"
    assert not coverage([], (8,), limit=1).more
    every_other = coverage([Box((row,), (row + 1,)) for row in range(1, 8, 2)], (8,), limit=2)
    assert every_other.problems() == ("no box holds 0:1", "no box holds 2:3", "and more")


def test_joining_keeps_the_indices() -> None:
    random = Random(3)
    for _ in range(200):
        shape = tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))
        parts = [box for box in random_partition(random, Box.whole(shape), splits=8) if box.size]
        kept = random.sample(parts, random.randint(0, len(parts)))
        joined = join(kept)
        assert np.array_equal(counts(list(joined), shape), counts(kept, shape))
        assert len(joined) <= len(kept)
    assert join(random_partition(random, Box.whole((9,)), splits=8)) == (Box.whole((9,)),)
