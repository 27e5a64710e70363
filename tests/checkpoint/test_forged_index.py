"""Forged index files, whose digests are right: one message in bounded time and memory, never a traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import (
    CheckpointError,
    OwnedBox,
    TensorInfo,
    commit,
    join_save,
    open_checkpoint,
    saving,
    write_part,
)
from shardwright.core.boxes.box import Box
from tests.checkpoint.editing import INDEX, Arrays, edit_arrays, edit_manifest, made, part_file, put, write_signed
from tests.checkpoint.refusing import limited, refused
from tests.checkpoint.states import point, save, small_state

PART = part_file()
MOST, LEAST = (1 << 63) - 1, -(1 << 63)
MOST_32, LEAST_32 = (1 << 31) - 1, -(1 << 31)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with limited():
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


def swapped(arrays: Arrays) -> None:
    arrays["row"][:2] = arrays["row"][1::-1]


NOT_THOSE = f"{PART}: its boxes are not those that the index has of this process."
INDEX_EDITS: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "rows swapped": (swapped, NOT_THOSE),
    "other boxes": (
        # Two columns fewer in the first box, two more in the second.
        lambda arrays: arrays["corners"].__setitem__([3, 5], 2),
        NOT_THOSE,
    ),
    "row of another": (put("row", 0, 1), NOT_THOSE),
    "row that is not there": (put("row", 0, MOST_32), NOT_THOSE),
    "row below 0": (put("row", 0, LEAST_32), f"{INDEX}: row: found -2,147,483,648, needed at least 0."),
    "part that is not there": (put("part", 1, MOST_32), f"{INDEX}: part: needed numbers of the 1 parts."),
    "part below 0": (put("part", 3, -1), f"{INDEX}: part: needed numbers of the 1 parts."),
    "boxes below 0": (put("num_boxes", 0, -1), f"{INDEX}: num_boxes: needed one number for each of the 3 tensors."),
    "boxes at the most": (
        lambda arrays: arrays.update(num_boxes=np.array([MOST] * 3)),
        f"{INDEX}: found 4 parts, 4 rows and 10 corners, needed {3 * MOST:,}, {3 * MOST:,} and {6 * MOST:,}.",
    ),
    "boxes of another tensor": (
        lambda arrays: arrays.update(num_boxes=np.array([1, 3, 0])),
        f"{INDEX}: tensor 'embed' of shape (4, 8) is not covered exactly once by its boxes: no box covers [0:4,4:8].",
    ),
    "corner below 0": (
        put("corners", 0, -1),
        f"{INDEX}: tensor 'embed': from (-1, 0) to (4, 4) is not a box within the shape (4, 8).",
    ),
    "corner at the most": (
        put("corners", 3, MOST),
        f"{INDEX}: tensor 'embed': from (0, 0) to (4, {MOST}) is not a box within the shape (4, 8).",
    ),
    "corner at the least": (
        put("corners", 4, LEAST),
        f"{INDEX}: tensor 'embed': from ({LEAST}, 4) to (4, 8) is not a box within the shape (4, 8).",
    ),
    "box without elements": (
        put("corners", 2, 0),
        f"{INDEX}: tensor 'embed': from (0, 0) to (0, 4) is not a box within the shape (4, 8).",
    ),
    "fewer corners": (
        made("corners", lambda array: array[:-1]),
        f"{INDEX}: found 4 parts, 4 rows and 9 corners, needed 4, 4 and 10.",
    ),
    "fewer rows": (
        made("row", lambda array: array[:-1]),
        f"{INDEX}: found 4 parts, 3 rows and 10 corners, needed 4, 4 and 10.",
    ),
    "no numbers": (
        made("num_boxes", lambda array: array[:0]),
        f"{INDEX}: num_boxes: needed one number for each of the 3 tensors.",
    ),
    "another dtype": (
        made("row", lambda array: array.astype(np.int64)),
        f"{INDEX}: row, dtype: found 'I64', needed 'I32'.",
    ),
    "another shape": (
        made("row", lambda array: array[:, None]),
        f"{INDEX}: row, shape: found [4, 1], needed a list of 1 whole numbers, at least 0 each.",
    ),
    "an array more": (lambda arrays: arrays.update(x=np.zeros(3)), f"{INDEX}: x: no such array is known."),
    "an array fewer": (lambda arrays: arrays.pop("row"), f"{INDEX}: the field 'row' is missing."),
}


@pytest.mark.parametrize("name", INDEX_EDITS)
def test_a_forged_index(directory: Path, name: str) -> None:
    change, expected = INDEX_EDITS[name]
    edit_arrays(directory, INDEX, lambda arrays, _: change(arrays))
    assert refused(directory) == f"DIR/{expected}"


def two_equal_tensors(out: Path) -> Path:
    """Two processes, of which each has half the rows of 'a' and of 'b', of one shape and dtype."""
    array = np.arange(16, dtype=np.float32).reshape(4, 4)
    infos = [TensorInfo(name=name, shape=(4, 4), dtype="float32") for name in ("a", "b")]
    with saving(out, 10) as under_way:
        for process in range(2):
            box = Box((2 * process, 0), (2 * process + 2, 4))
            owned = [OwnedBox(name=info.name, box=box, array=array[box.slices]) for info in infos]
            write_part(join_save(out, 10, under_way.name), infos, owned, process=process)
        return commit(under_way, point(), num_processes=2)


def test_a_box_of_another_tensor_or_process(tmp_path: Path) -> None:
    """What a process that opens no part finds when it reads."""
    directory = two_equal_tensors(tmp_path)
    good = (directory / PART).read_bytes()
    edit_arrays(directory, PART, lambda arrays, _: put("tensor", slice(0, 2), [1, 0])(arrays))
    assert refused(directory) == f"DIR/{NOT_THOSE}"
    assert (
        lazily(directory)
        == f"DIR/{PART}: row 0 is tensor 'b', box [0:2,0:4], and the index has tensor 'a', box [0:2,0:4] there."
    )
    write_signed(directory, PART, good)
    assert lazily(directory) == ""
    edit_arrays(directory, INDEX, lambda arrays, _: put("row", slice(0, 4), [0, 0, 7, 1])(arrays))
    assert refused(directory) == f"DIR/{NOT_THOSE}"
    assert lazily(directory) == ""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory, all_files=False).read_box("b")
    assert (
        str(caught.value) == f"{directory}/{PART}: row 7 is missing, and the index has tensor 'b', box [0:2,0:4] there."
    )
    edit_arrays(
        directory,
        INDEX,
        lambda arrays, _: arrays.update(part=arrays["part"][::-1], row=np.array([0, 0, 1, 1], np.int32)),
    )
    assert (
        lazily(directory)
        == f"DIR/{part_file(1)}: row 0 is tensor 'a', box [2:4,0:4], and the index has tensor 'a', box [0:2,0:4] there."
    )


def lazily(directory: Path) -> str:
    """The error of reading 'a' without verifying the parts first, or nothing."""
    try:
        open_checkpoint(directory, all_files=False).read_box("a")
    except CheckpointError as error:
        return str(error).replace(str(directory), "DIR")
    return ""


def test_many_parts(directory: Path) -> None:
    edit_manifest(directory, lambda value: value.update(parts=value["parts"] * 50_000))
    with pytest.raises(CheckpointError, match=r"part-00001.index: the file is missing\."):
        open_checkpoint(directory)
    assert open_checkpoint(directory, all_files=False).read_box("count") == 7
