"""A damaged or edited checkpoint is refused with an error that names the file and the tensor. It is never partly read."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, DamagedError, latest, open_checkpoint, set_aside, verify
from shardwright.core.boxes.box import Box
from tests.checkpoint.editing import INDEX, MANIFEST, box_of, data_file, flip, part_file
from tests.checkpoint.states import State, save, small_state

DATA, PART = data_file(), part_file()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


def refused(directory: Path, call: Callable[[], object] | None = None) -> str:
    """The full message with which a checkpoint is refused, its directory written as DIR."""
    with pytest.raises(CheckpointError) as caught:
        (call or (lambda: open_checkpoint(directory)))()
    return str(caught.value).replace(str(directory), "DIR")


def test_a_flipped_bit_in_a_box_is_found_when_it_is_read(directory: Path) -> None:
    flip(directory / DATA, box_of(directory, "embed", 1)["offset"] + 13, 6)
    checkpoint = open_checkpoint(directory)
    expected = (
        f"DIR/{DATA}: tensor 'embed', box [0:4,4:8]: bytes 384 to 448 do not match their digest: the file was damaged "
        f"after it was written. Restore it from a copy, or resume from another checkpoint."
    )
    assert refused(directory, lambda: checkpoint.read_box("embed")) == expected
    assert refused(directory, lambda: checkpoint.read_box("embed")) == expected
    assert checkpoint.read_box("count") == 7


def test_every_bit_of_every_file_counts(directory: Path) -> None:
    """Every flipped bit is refused, except in white space between the fields of the manifest."""
    rng = np.random.default_rng(0)
    for name in (DATA, PART, INDEX, MANIFEST):
        good = (directory / name).read_bytes()
        for byte in rng.permutation(len(good))[:100].tolist():
            flip(directory / name, byte, int(rng.integers(8)))
            spaces = name == MANIFEST and good[byte : byte + 1].isspace()
            assert not verify(directory)["ok"] or spaces, (name, byte)
            (directory / name).write_bytes(good)
    assert verify(directory)["ok"]


def test_a_flipped_bit_in_a_header(directory: Path) -> None:
    flip(directory / DATA, 30)
    assert refused(directory) == (
        f"DIR/{DATA}: its header does not match its digest: the file was damaged after it was written. "
        f"It holds boxes of 'embed', 'count', 'scale'. Restore it from a copy, or resume from another checkpoint."
    )


def test_a_truncated_file(directory: Path) -> None:
    path = directory / DATA
    path.write_bytes(path.read_bytes()[:-1])
    assert refused(directory) == (
        f"DIR/{DATA}: found 463 bytes, needed 464. It holds boxes of 'embed', 'count', 'scale'. "
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
        f"DIR/{DATA}: tensor 'embed', box [0:4,0:4]: bytes 320 to 384 do not match their digest: the file was damaged "
        f"after it was written. Restore it from a copy, or resume from another checkpoint."
    )


def test_a_missing_file(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    (directory / DATA).unlink()
    assert refused(directory) == (
        f"DIR/{DATA}: the file is missing. It holds boxes of 'embed', 'count', 'scale'. "
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
        f"{DATA}: tensor 'embed', box [0:4,0:4]",
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
