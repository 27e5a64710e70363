"""An edited checkpoint, whose digests are right, is refused with an error that names the file, the tensor and both numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import CheckpointError, open_checkpoint, verify
from tests.checkpoint.editing import (
    INDEX,
    MANIFEST,
    data_file,
    edit_boxes,
    edit_manifest,
    part_file,
    tensor,
    write_manifest,
)
from tests.checkpoint.states import save, small_state

DATA, PART = data_file(), part_file()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


def refused(directory: Path, call: Callable[[], object] | None = None) -> str:
    """The full message with which a checkpoint is refused, its directory written as DIR."""
    with pytest.raises(CheckpointError) as caught:
        (call or (lambda: open_checkpoint(directory)))()
    return str(caught.value).replace(str(directory), "DIR")


def _shape(name: str, shape: list[int]) -> Callable[[dict[str, Any]], object]:
    return lambda value: tensor(value, name).update(shape=shape)


MANIFEST_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown dtype": (
        lambda value: tensor(value, "scale").update(dtype="bfloat61"),
        ": tensor 'scale', dtype: 'bfloat61' is not a dtype of this format. Did you mean 'bfloat16'?",
    ),
    "dtype of the same width": (
        lambda value: tensor(value, "scale").update(dtype="float16") or value.update(manifest_digest="0" * 32),
        ": its content does not match its own digest: it was damaged or edited after it was written. "
        "Restore it from a copy, or resume from another checkpoint.",
    ),
    "unknown version": (
        lambda value: value.update(version=3),
        ": version: found 3, and this release reads version 2. Read it with the release that wrote it.",
    ),
    "earlier version": (
        lambda value: value.update(version=1),
        ": version: found 1, and this release reads version 2. Read it with the release that wrote it.",
    ),
    "another format": (
        lambda value: value.update(format="torch"),
        ": format: found 'torch', needed 'shardwright-checkpoint'. This file was not written by Shardwright.",
    ),
    "missing field": (lambda value: value.pop("seed"), ": the field 'seed' is missing."),
    "missing field of a part": (
        lambda value: value["parts"][0].pop("digest"),
        ": parts[0]: the field 'digest' is missing.",
    ),
    "text for a number": (
        lambda value: value.update(step="10"),
        ': step: found "10", needed a whole number, at least 0.',
    ),
    "truth for a number": (
        lambda value: value.update(data_position=True),
        ": data_position: found true, needed a whole number, at least 0.",
    ),
    "mesh of nothing": (
        lambda value: value["mesh"].update(fsdp=0),
        ": mesh, fsdp: found 0, needed a whole number, at least 1.",
    ),
    "list for a mapping": (lambda value: value.update(layout=[1]), ": layout: found [1], needed a mapping."),
    "digest that is none": (
        lambda value: value["parts"][0].update(digest="abc"),
        ": parts[0], digest: 'abc' is not a digest of 32 hex digits.",
    ),
    "digest of the index that is none": (
        lambda value: value["index"].update(digest="0" * 31 + "G"),
        ": index, digest: '0000000000000000000000000000000G' is not a digest of 32 hex digits.",
    ),
    "pieces of nothing": (
        lambda value: value.update(piece_bytes=0),
        ": piece_bytes: found 0, needed a whole number, at least 1.",
    ),
    "time in another form": (
        lambda value: value.update(saved_at="2026-03-01 08:15"),
        ": saved_at: '2026-03-01 08:15' is not a time, as 2026-03-01T08:15:42Z.",
    ),
    "metric that is a text": (
        lambda value: value.update(metrics={"loss": "low"}),
        ': metrics, loss: found "low", needed a number.',
    ),
    "metric of 400 digits": (
        lambda value: value.update(metrics={"loss": 10**400}),
        f": metrics, loss: found 1{'0' * 56}..., needed a number of 64 bits.",
    ),
    "rule that keeps nothing": (
        lambda value: value.update(keep={"newest": 0}),
        ": keep, newest: found 0, needed a whole number, at least 1.",
    ),
    "tensor twice": (
        lambda value: value["tensors"].append(value["tensors"][0]),
        ": tensors[3]: the tensor 'embed' is listed twice.",
    ),
}


@pytest.mark.parametrize("name", MANIFEST_EDITS)
def test_an_edited_manifest(directory: Path, name: str) -> None:
    change, expected = MANIFEST_EDITS[name]
    edit_manifest(directory, change, sign="same width" not in name)
    assert refused(directory) == f"DIR/{MANIFEST}{expected}"


SIZES = "{PART}: has 1 files of 464 bytes, and the manifest {}."
OTHERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "smaller shape": (
        _shape("embed", [3, 8]),
        f"{INDEX}: tensor 'embed': from (0, 0) to (4, 4) is not a box within the shape (3, 8).",
    ),
    "larger shape": (
        _shape("scale", [7]),
        f"{INDEX}: tensor 'scale' of shape (7,) is not covered exactly once by its boxes: no box covers [6:7].",
    ),
    "another rank": (
        _shape("scale", [6, 1]),
        f"{INDEX}: found 4 parts, 4 rows and 10 corners, needed 4, 4 and 12.",
    ),
    "wider dtype": (
        lambda value: tensor(value, "scale").update(dtype="float32"),
        f"{PART}: file '{DATA}': header and boxes have 476 bytes in total, the listed size is 464.",
    ),
    "one more tensor": (
        lambda value: value["tensors"].append({"name": "x", "shape": [1], "dtype": "int8", "spec": ""}),
        f"{INDEX}: num_boxes: needed one number for each of the 4 tensors.",
    ),
    "one more part": (
        lambda value: value["parts"].append(value["parts"][0]),
        "part-00001.index: the file is missing. It holds the digests of the boxes of process 1. "
        "Restore it from a copy, or resume from another checkpoint.",
    ),
    "no part": (lambda value: value["parts"].clear(), f"{INDEX}: part: needed numbers of the 0 parts."),
    "pieces of another size": (
        lambda value: value.update(piece_bytes=1 << 19),
        f"{PART}: has digests of pieces of 1,048,576 bytes, and the manifest of 524,288.",
    ),
    "more files": (
        lambda value: value["parts"][0].update(num_files=2),
        f"{PART}: has 1 files of 464 bytes, and the manifest 2 of 464.",
    ),
    "fewer bytes": (
        lambda value: value["parts"][0].update(data_bytes=463),
        f"{PART}: has 1 files of 464 bytes, and the manifest 1 of 463.",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_manifest_that_is_not_of_its_index_and_parts(directory: Path, name: str) -> None:
    change, expected = OTHERS[name]
    edit_manifest(directory, change)
    assert refused(directory) == f"DIR/{expected}"


def _remove_box(part: dict[str, Any]) -> None:
    """A hole, with the bytes of the file adjusted so that the hole is the only fault."""
    [number] = [number for number, box in enumerate(part["boxes"]) if not box["start"]]
    del part["boxes"][number]
    part["boxes"][number]["offset"] -= 4
    part["files"][0]["bytes"] -= 4


BOX_EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hole": (
        lambda part: part["boxes"].pop(0),
        f"{INDEX}: tensor 'embed' of shape (4, 8) is not covered exactly once by its boxes: no box covers [0:4,0:4].",
    ),
    "hole that the files do not show": (
        _remove_box,
        f"{INDEX}: tensor 'count' of shape () is not covered exactly once by its boxes: no box covers [].",
    ),
    "overlap": (
        lambda part: part["boxes"][1].update(start=[0, 3], stop=[4, 7]),
        f"{INDEX}: tensor 'embed' of shape (4, 8) is not covered exactly once by its boxes: no box covers [0:4,7:8]; "
        "the boxes [0:4,0:4] and [0:4,3:7] both cover [0:4,3:4].",
    ),
    "file that is not listed": (
        lambda part: part["boxes"][3].update(file=1),
        f"{PART}: file: needed numbers of the 1 files, in ascending order.",
    ),
    "file below 0": (
        lambda part: part["boxes"][0].update(file=-1),
        f"{PART}: file: needed numbers of the 1 files, in ascending order.",
    ),
    "boxes on the same bytes": (
        lambda part: part["boxes"][1].update(offset=320),
        f"{PART}: tensor 'embed', box [0:4,4:8]: starts at byte 320 of '{DATA}', needed 384, where the bytes before it end.",
    ),
    "bytes that are in no box": (
        lambda part: part["files"][0].update(bytes=500),
        f"{PART}: file '{DATA}': header and boxes have 464 bytes in total, the listed size is 500.",
    ),
    "missing digest": (
        lambda part: part["boxes"][3]["digests"].clear(),
        f"{PART}: digests: found (3, 16), needed (4, 16).",
    ),
    "header of no bytes": (
        lambda part: part["files"][0].update(header_bytes=0),
        f"{PART}: header_bytes: found 0, needed 8 to 100,000,008.",
    ),
    "file twice": (
        lambda part: part["files"].append(part["files"][0]),
        f"{PART}: file 'boxes-00000-00001.safetensors': header and boxes have 320 bytes in total, the listed size is 464.",
    ),
    "file that is not there": (
        lambda part: part["files"].append(part["files"][0] | {"bytes": 320}),
        "boxes-00000-00001.safetensors: the file is missing. It holds no boxes. "
        "Restore it from a copy, or resume from another checkpoint.",
    ),
}


@pytest.mark.parametrize("name", BOX_EDITS)
def test_edited_boxes(directory: Path, name: str) -> None:
    change, expected = BOX_EDITS[name]
    edit_boxes(directory, change)
    assert refused(directory) == f"DIR/{expected}"


def test_swapped_boxes_of_one_size_are_found_by_their_digests(directory: Path) -> None:
    """As if the shards of two ranks were swapped: shapes, sizes and cover are right, the elements are not."""

    def swap(part: dict[str, Any]) -> None:
        first, second = part["boxes"][:2]
        for field in fields:
            first[field], second[field] = second[field], first[field]

    fields = ["start", "stop", "digests"]
    edit_boxes(directory, swap)
    first, second = (
        f"tensor 'embed', box [0:4,{box}]: bytes {at} do not match"
        for box, at in (("4:8", "320 to 384"), ("0:4", "384 to 448"))
    )
    assert second in refused(directory, lambda: open_checkpoint(directory).read_box("embed"))
    found = problems(directory)
    assert first in found[0]
    assert second in found[1]
    assert "Key 'embed[0:4,4:8]': found {" in found[2]
    # With digests of the swapped elements too, other programs would read something else than this one.
    fields = ["digests"]
    edit_boxes(directory, swap)
    [problem] = problems(directory)
    assert "Key 'embed[0:4,4:8]': found {" in problem


def problems(directory: Path) -> list[str]:
    return [problem["message"] for problem in verify(directory)["checkpoints"][0]["problems"]]


def every_value(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, item in list(value.items()) if isinstance(value, dict) else list(enumerate(value)):
        yield value, key
        if isinstance(item, (dict, list)):
            yield from every_value(item)


def test_no_value_of_a_manifest_can_be_wrong_and_end_in_a_traceback(directory: Path) -> None:
    """Each value in turn becomes each kind of nonsense, with the manifest's digest recomputed: refused or harmless."""
    good = (directory / "manifest.json").read_text()
    count = len(list(every_value(json.loads(good))))
    for number in range(count):
        for nonsense in (None, -1, 10**40, "x", [], {}):
            value = json.loads(good)
            container, key = list(every_value(value))[number]
            container[key] = nonsense
            write_manifest(directory, value)
            result = verify(directory)
            assert result["ok"] == (not result["checkpoints"][0]["problems"])
