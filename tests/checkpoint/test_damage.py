"""A damaged or edited checkpoint is refused with an error that names the file and the tensor. It is never partly read."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, DamagedError, latest, open_checkpoint, set_aside, verify
from shardwright.checkpoint.format.manifest import content_digest
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import State, save, small_state

DATA = "boxes-00000-00000.safetensors"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


def refused(directory: Path, call: Callable[[], object] | None = None) -> str:
    """The full message with which a checkpoint is refused, its directory written as DIR."""
    with pytest.raises(CheckpointError) as caught:
        (call or (lambda: open_checkpoint(directory)))()
    return str(caught.value).replace(str(directory), "DIR")


def edit(directory: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    """Edits the manifest. With ``sign`` its digest is recomputed, so that other checks must find the edit."""
    path = directory / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    if sign:
        value["manifest_digest"] = content_digest(value)
    path.write_text(json.dumps(value))


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def tensor(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in value["tensors"] if item["name"] == name)


def box_of(directory: Path, name: str, number: int = 0) -> dict[str, Any]:
    return tensor(json.loads((directory / "manifest.json").read_text()), name)["boxes"][number]


def test_a_flipped_bit_in_a_box_is_found_when_it_is_read(directory: Path) -> None:
    flip(directory / DATA, box_of(directory, "embed", 1)["offset"] + 13, 6)
    checkpoint = open_checkpoint(directory)
    expected = (
        f"DIR/{DATA}: tensor 'embed', box [2:4,0:8]: bytes 384 to 448 do not match their digest: the file was damaged "
        f"after it was written. Restore it from a copy, or resume from another checkpoint."
    )
    assert refused(directory, lambda: checkpoint.read_box("embed")) == expected
    assert refused(directory, lambda: checkpoint.read_box("embed")) == expected
    assert checkpoint.read_box("count") == 7


def test_every_bit_of_every_file_counts(directory: Path) -> None:
    """Every flipped bit is refused, except in white space between the fields of the manifest."""
    rng = np.random.default_rng(0)
    for name in (DATA, "manifest.json"):
        good = (directory / name).read_bytes()
        for byte in rng.permutation(len(good))[:100].tolist():
            flip(directory / name, byte, int(rng.integers(8)))
            assert not verify(directory)["ok"] or good[byte : byte + 1].isspace(), (name, byte)
            (directory / name).write_bytes(good)
    assert verify(directory)["ok"]


def test_a_flipped_bit_in_a_header(directory: Path) -> None:
    flip(directory / DATA, 30)
    assert refused(directory) == (
        f"DIR/{DATA}: its header does not match its digest: the file was damaged after it was written. "
        f"It holds boxes of 'embed', 'scale', 'count'. Restore it from a copy, or resume from another checkpoint."
    )


def test_a_truncated_file(directory: Path) -> None:
    path = directory / DATA
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(directory) == (
        f"DIR/{DATA}: found 463 bytes, needed 464. It holds boxes of 'embed', 'scale', 'count'. "
        f"Restore it from a copy, or resume from another checkpoint."
    )


@pytest.mark.parametrize(
    ("num", "holds"),
    [(3, "'a0', 'a1', 'a2'"), (4, "'a0', 'a1', 'a2' and 1 more tensor"), (6, "'a0', 'a1', 'a2' and 3 more tensors")],
)
def test_a_file_of_many_tensors_names_the_first_few(num: int, holds: str, tmp_path: Path) -> None:
    arrays = {f"a{number}": np.arange(3, dtype=np.int32) for number in range(num)}
    directory = save(tmp_path, State(arrays=arrays, boxes={name: [Box((0,), (3,))] for name in arrays}))
    (directory / DATA).unlink()
    assert f"the file is missing. It holds boxes of {holds}. " in refused(directory)


def test_a_file_truncated_after_it_was_opened(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    path = directory / DATA
    path.write_bytes(path.read_bytes()[:350])
    assert refused(directory, lambda: checkpoint.read_box("embed")) == (
        f"DIR/{DATA}: tensor 'embed', box [0:2,0:8]: bytes 320 to 384 do not match their digest: the file was damaged "
        f"after it was written. Restore it from a copy, or resume from another checkpoint."
    )


def test_a_missing_file(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    (directory / DATA).unlink()
    assert refused(directory) == (
        f"DIR/{DATA}: the file is missing. It holds boxes of 'embed', 'scale', 'count'. "
        f"Restore it from a copy, or resume from another checkpoint."
    )
    assert refused(directory, lambda: checkpoint.read_box("count")) == (
        f"DIR/{DATA}: tensor 'count', box []: cannot be read: No such file or directory."
    )


def test_a_file_of_another_step(directory: Path, tmp_path: Path) -> None:
    other = save(tmp_path, small_state(), step=20)
    (directory / DATA).write_bytes((other / DATA).read_bytes())
    assert refused(directory).startswith(f"DIR/{DATA}: its header does not match its digest")


def test_a_directory_without_a_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    assert refused(directory) == (
        "DIR: there is no manifest.json, so this is not a checkpoint. "
        "Give the directory of one step, as in OUT/checkpoints/step-00000010."
    )


def test_a_directory_under_another_step_s_name(directory: Path) -> None:
    other = directory.with_name("step-00000020")
    directory.rename(other)
    assert refused(other) == "DIR: the manifest is of step 10, the directory of step 20."


def test_a_complete_looking_leftover_is_no_checkpoint(directory: Path) -> None:
    other = directory.with_name("step-00000010.deleting-0123abcd")
    directory.rename(other)
    assert refused(other) == "DIR: the save or the deletion of this checkpoint did not finish. Give another one."


def test_the_latest_intact_checkpoint_is_found_and_those_passed_over_are_reported(tmp_path: Path) -> None:
    first, second, third = (save(tmp_path, small_state(), step) for step in (5, 10, 15))
    (second / DATA).unlink()
    (third / "manifest.json").write_text("{")
    found = latest(tmp_path)
    assert found.checkpoint is not None
    assert found.checkpoint.directory == first
    assert [str(error).replace(str(tmp_path), "OUT").split(". ")[0] for error in found.passed_over] == [
        "OUT/checkpoints/step-00000015/manifest.json: not JSON: Expecting property name enclosed in double quotes "
        "at line 1, column 2.",
        f"OUT/checkpoints/step-00000010/{DATA}: the file is missing",
    ]


def test_there_may_be_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path).checkpoint is None
    assert latest(tmp_path / "nowhere").checkpoint is None


def _remove_box(value: dict[str, Any]) -> None:
    """A hole, with the file list adjusted so that the hole is the only fault."""
    del tensor(value, "count")["boxes"][0]
    value["files"][0]["bytes"] -= 4


def _twice_the_same(value: dict[str, Any]) -> None:
    boxes = tensor(value, "embed")["boxes"]
    boxes[1] |= {"start": [1, 0], "stop": [3, 8]}


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "hole": (
        lambda value: tensor(value, "embed")["boxes"].pop(0),
        ": tensor 'embed' of shape (4, 8) is not covered exactly once by its boxes: no box covers [0:2,0:8].",
    ),
    "hole that the files do not show": (
        _remove_box,
        ": tensor 'count' of shape () is not covered exactly once by its boxes: no box covers [].",
    ),
    "overlap": (
        _twice_the_same,
        ": tensor 'embed' of shape (4, 8) is not covered exactly once by its boxes: no box covers [3:4,0:8]; "
        "the boxes [0:2,0:8] and [1:3,0:8] both cover [1:2,0:8].",
    ),
    "smaller shape": (
        lambda value: tensor(value, "embed").update(shape=[3, 8]),
        ": tensor 'embed', boxes[1]: from (2, 0) to (4, 8) is not a box within the shape (3, 8).",
    ),
    "larger shape": (
        lambda value: tensor(value, "scale").update(shape=[7]),
        ": tensor 'scale' of shape (7,) is not covered exactly once by its boxes: no box covers [6:7].",
    ),
    "another rank": (
        lambda value: tensor(value, "scale").update(shape=[6, 1]),
        ": tensor 'scale', boxes[0], start: found [0], needed a list of 2 whole numbers, at least 0 each.",
    ),
    "wider dtype": (
        lambda value: tensor(value, "scale").update(dtype="float32"),
        ": tensor 'scale', boxes[0], bytes: found 12, needed 24 for [0:6] of float32.",
    ),
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
        lambda value: value.update(version=2),
        ": version: found 2, and this release reads version 1. Read it with the release that wrote it.",
    ),
    "another format": (
        lambda value: value.update(format="torch"),
        ": format: found 'torch', needed 'shardwright-checkpoint'. This file was not written by Shardwright.",
    ),
    "missing field": (lambda value: value.pop("seed"), ": the field 'seed' is missing."),
    "missing field of a box": (
        lambda value: tensor(value, "embed")["boxes"][1].pop("digest"),
        ": tensor 'embed', boxes[1]: the field 'digest' is missing.",
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
        lambda value: tensor(value, "count")["boxes"][0].update(digest="abc"),
        ": tensor 'count', boxes[0], digest: 'abc' is not a digest of 32 hex digits.",
    ),
    "file elsewhere": (
        lambda value: value["files"][0].update(name="../../x.safetensors"),
        ": files[0], name: '../../x.safetensors' is not the name of a .safetensors file next to the manifest.",
    ),
    "file that is not listed": (
        lambda value: tensor(value, "count")["boxes"][0].update(file="x.safetensors"),
        ": tensor 'count', box []: its file 'x.safetensors' is not in the list of files.",
    ),
    "boxes on the same bytes": (
        lambda value: tensor(value, "embed")["boxes"][1].update(offset=320),
        f": tensor 'embed', box [2:4,0:8]: starts at byte 320 of '{DATA}', needed 384, where the bytes before it end.",
    ),
    "bytes that are in no box": (
        lambda value: value["files"][0].update(bytes=500),
        f": file '{DATA}': header and boxes have 464 bytes in total, the listed size is 500.",
    ),
    "tensor twice": (
        lambda value: value["tensors"].append(value["tensors"][0]),
        ": tensors[3]: the tensor 'embed' is listed twice.",
    ),
    "file twice": (lambda value: value["files"].append(value["files"][0]), ": files: a file is listed twice."),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_manifest(directory: Path, name: str) -> None:
    change, expected = EDITS[name]
    edit(directory, change, sign="same width" not in name)
    assert refused(directory) == f"DIR/manifest.json{expected}"


def test_swapped_boxes_of_one_size_are_found_by_their_digests(directory: Path) -> None:
    """As if the shards of two ranks were swapped: shapes, sizes and cover are right, the elements are not."""

    def swap(value: dict[str, Any]) -> None:
        first, second = tensor(value, "embed")["boxes"]
        for field in fields:
            first[field], second[field] = second[field], first[field]

    fields = ["offset"]
    edit(directory, swap)
    assert "Key 'embed[0:2,0:8]': found {" in refused(directory)
    # Only the elements are then in the wrong place.
    fields = ["key"]
    edit(directory, swap)
    assert "tensor 'embed', box [0:2,0:8]: bytes 384 to 448 do not match" in refused(
        directory, lambda: open_checkpoint(directory).read_box("embed")
    )


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
            value["manifest_digest"] = content_digest(value)
            (directory / "manifest.json").write_text(json.dumps(value))
            result = verify(directory)
            assert result["ok"] == (not result["checkpoints"][0]["problems"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b'{"format": 1,,}', "not JSON: Expecting property name enclosed in double quotes at line 1, column 14."),
        (b"", "not JSON: Expecting value at line 1, column 1."),
        (b'{"a": "\xff"}', "not JSON: byte 7 is not UTF-8."),
        (b"[1]", "found [1], needed a mapping."),
        (b'{"format": "a", "format": "b"}', "not usable as JSON: the field 'format' appears twice."),
        (b'{"format": NaN}', "not usable as JSON: NaN is not a JSON number."),
        (b'{"format": ' + b"[" * 100_000, "not usable as JSON: maximum recursion depth exceeded"),
    ],
)
def test_a_manifest_that_is_not_json(directory: Path, text: bytes, expected: str) -> None:
    (directory / "manifest.json").write_bytes(text)
    assert refused(directory).startswith(f"DIR/manifest.json: {expected}")


def test_an_unreadable_manifest(directory: Path) -> None:
    (directory / "manifest.json").unlink()
    (directory / "manifest.json").mkdir()
    assert refused(directory) == "DIR/manifest.json: cannot be read: Is a directory."


def test_verify_reports_every_fault(directory: Path) -> None:
    flip(directory / DATA, box_of(directory, "count")["offset"])
    flip(directory / DATA, box_of(directory, "embed")["offset"])
    (directory / "boxes-00001-00000.safetensors").write_bytes(b"from another world size")
    result = verify(directory)
    [checked] = result["checkpoints"]
    assert not result["ok"]
    assert [re.sub(r"^\S+/", "", problem["message"]).split(": bytes")[0] for problem in checked["problems"]] == [
        f"{DATA}: tensor 'embed', box [0:2,0:8]",
        f"{DATA}: tensor 'count', box []",
        "boxes-00001-00000.safetensors: the manifest does not list this file. Move it away.",
    ]
    assert {problem["code"] for problem in checked["problems"]} == {"SW503"}


def test_the_error_can_be_pickled() -> None:
    for kind in (CheckpointError, DamagedError):
        error = pickle.loads(pickle.dumps(kind("text", code="SW501")))
        assert (type(error), str(error), error.code, error.exit_code) == (kind, "text", "SW501", 2)


def test_what_was_passed_over_is_set_aside_and_its_step_can_be_saved_again(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, small_state(), step)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").write_text("{", encoding="utf-8")
    assert latest(tmp_path).checkpoint is not None
    aside = set_aside(tmp_path / "checkpoints" / "step-00000002", "damaged")
    assert re.fullmatch(r"step-00000002\.damaged-[0-9a-f]{8}", aside.name)
    assert (aside / "manifest.json").read_text(encoding="utf-8") == "{"
    save(tmp_path, small_state(), 2)
    found = latest(tmp_path)
    assert found.checkpoint is not None
    assert (found.checkpoint.point.step, found.passed_over) == (2, ())
    assert aside.is_dir()


def test_what_was_set_aside_can_be_looked_at(directory: Path) -> None:
    aside = set_aside(directory, "set-aside")
    assert re.fullmatch(r"step-\d{8}\.set-aside-[0-9a-f]{8}", aside.name)
    assert verify(aside)["ok"]
    with pytest.raises(CheckpointError, match=r"cannot be renamed to \S+: No such file or directory\.$"):
        set_aside(directory, "set-aside")
