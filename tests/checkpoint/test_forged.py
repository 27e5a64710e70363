"""Forged and edited checkpoints, whose digests are right: an error in bounded time and memory, never a hang or a traceback."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import (
    CheckpointError,
    DamagedError,
    OwnedBox,
    TensorInfo,
    latest,
    open_checkpoint,
    save_checkpoint,
    verify,
)
from shardwright.cli.main import main
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from tests.checkpoint.states import point, save, small_state
from tests.fuzz.forging import (
    TIB,
    data_of,
    forged_checkpoint,
    header_of,
    large_box,
    manifest_of,
    no_file,
    with_length,
    write_header,
    write_manifest,
)
from tests.fuzz.running import memory_bound

LIMIT_S = 20


class HangsError(BaseException):
    """The test waits, or computes without an end."""


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Each test has a time limit, also for a wait in a system call, and 1 GiB of memory."""

    def ring(*_: object) -> None:
        raise HangsError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(LIMIT_S)
    try:
        with memory_bound():
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


def refused(directory: Path) -> str:
    """The message with which a checkpoint is refused; it is not proven damaged, as its digests are right."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert not isinstance(caught.value, DamagedError)
    assert not verify(directory)["ok"]
    return str(caught.value).replace(str(directory), "DIR")


def edited(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = manifest_of(directory)
    change(value)
    write_manifest(directory, value)


def ones(num_dims: int) -> Callable[[dict[str, Any]], object]:
    """The tensor 'scale' with one element in many dims."""

    def change(value: dict[str, Any]) -> None:
        scale = value["tensors"][1]
        scale["shape"] = [6] + [1] * (num_dims - 1)
        scale["boxes"][0] |= {"start": [0] * num_dims, "stop": [6] + [1] * (num_dims - 1)}

    return change


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "infinite number": (
        lambda value: value.update(metadata={"lr": "(1e999)"}),
        "not usable as JSON: 1e999 is more than a number here can be.",
    ),
    "infinite size": (
        lambda value: value["tensors"][0].update(shape=["(1e999)", 8]),
        "not usable as JSON: 1e999 is more than a number here can be.",
    ),
    "number of 5,000 digits": (
        lambda value: value.update(seed="(long)"),
        "not usable as JSON: Exceeds the limit",
    ),
    "large dim": (
        lambda value: value["tensors"][0].update(shape=[10**30, 8]),
        "tensor 'embed', shape: found [1000000000000000000000000000000, 8], needed at most 9,223,372,036,854,775,807 each.",
    ),
    "large dims beside an empty one": (
        lambda value: value["tensors"].append(
            {"name": "none", "shape": [1 << 40, 0, 1 << 40], "dtype": "float32", "spec": "", "boxes": []}
        ),
        "tensor 'none', shape: found (1099511627776, 0, 1099511627776), which is "
        "4,835,703,278,458,516,698,824,704 bytes, needed at most 9,223,372,036,854,775,807.",
    ),
    "100,000 dims": (ones(100_000), "tensor 'scale', shape: found 100,000 dims, needed at most 64."),
    "100,000 dims without boxes": (
        lambda value: value["tensors"][1].update(shape=[6] * 100_000, boxes=[]),
        "tensor 'scale', shape: found 100,000 dims, needed at most 64.",
    ),
    "large step": (
        lambda value: value.update(step=10**30),
        "step: found 1000000000000000000000000000000, needed at most 9,223,372,036,854,775,807.",
    ),
    "large seed below 0": (
        lambda value: value.update(seed=-(10**30)),
        "seed: found -1000000000000000000000000000000, needed at most 9,223,372,036,854,775,807.",
    ),
    "large header": (
        lambda value: value["files"][0].update(bytes=TIB, header_bytes=TIB),
        "files[0], header_bytes: found 1,099,511,627,776, needed at most 100,000,008.",
    ),
    "deep metadata": (
        lambda value: value["metadata"].update(a="(deep)"),
        "metadata: lists and mappings are nested more than 64 deep.",
    ),
    "deep value elsewhere": (lambda value: value.update(step="(deep)"), ""),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_manifest_with_an_extreme_value(directory: Path, name: str) -> None:
    change, expected = EDITS[name]
    edited(directory, change)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    message = str(caught.value).replace(str(directory), "DIR")
    assert message.startswith(f"DIR/manifest.json: {expected}")
    assert len(message) < 500
    assert not verify(directory)["ok"]


def test_64_dims_are_read(directory: Path) -> None:
    edited(directory, ones(64))
    value = manifest_of(directory)
    header = header_of(directory)
    header["scale"]["shape"] = value["tensors"][1]["shape"]
    write_header(directory, with_length(header))
    assert open_checkpoint(directory).read_box("scale").shape == (6, *[1] * 63)


def test_metadata_that_is_nested_as_deep_as_is_read(tmp_path: Path) -> None:
    edited(
        directory := save(tmp_path, small_state()),
        lambda value: value.update(metadata=json.loads('{"a":' * 64 + "1" + "}" * 64)),
    )
    assert verify(directory)["ok"]
    assert main(["ckpt", "show", str(directory), "--json"]) == 0


def test_a_field_given_twice_among_many_is_found_at_once(directory: Path) -> None:
    fields = ",".join(f'"{number}": 0' for number in (*range(300_000), 299_999))
    (directory / "manifest.json").write_text("{" + fields + "}")
    with pytest.raises(CheckpointError, match=r"the field '299999' appears twice\.$"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("pipe", "cannot be read: not a regular file."),
        ("/dev/zero", "cannot be read: not a regular file."),
        ("/dev/full", "cannot be read: not a regular file."),
        ("loop", "cannot be read: Too many levels of symbolic links."),
        ("folder", "cannot be read: Is a directory."),
        ("sparse", "cannot be read: found 1,099,511,627,776 bytes, needed at most 1,073,741,824."),
    ],
)
def test_a_manifest_that_is_no_file_of_its_own(directory: Path, kind: str, problem: str) -> None:
    no_file(directory / "manifest.json", kind)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert str(caught.value) == f"{directory}/manifest.json: {problem}"
    assert not verify(directory)["ok"]


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "/dev/full"])
def test_a_data_file_that_is_no_file(directory: Path, kind: str) -> None:
    checkpoint = open_checkpoint(directory)
    no_file(data_of(directory), kind)
    assert refused(directory) == (
        f"DIR/{data_of(directory).name}: cannot be read: not a regular file. It holds boxes of 'embed', 'scale', 'count'. "
        "Restore it from a copy, or resume from another checkpoint."
    )
    with pytest.raises(CheckpointError, match=r"cannot be read: not a regular file\.$"):
        checkpoint.read_box("embed")


def test_a_link_to_a_data_file_is_read(directory: Path, tmp_path: Path) -> None:
    data_of(directory).rename(tmp_path / "elsewhere")
    data_of(directory).symlink_to(tmp_path / "elsewhere")
    assert verify(directory)["ok"]


def test_a_sparse_box_of_a_tebibyte(directory: Path) -> None:
    large_box(directory, TIB)
    assert refused(directory) == (
        "DIR/manifest.json: tensor 'w', boxes[0], bytes: found 1,099,511,627,776, needed at most 549,755,813,888."
    )


def test_a_box_that_is_larger_than_the_memory(directory: Path) -> None:
    large_box(directory, TIB // 2)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).read_box("w")
    assert str(caught.value) == (
        f"{directory}: tensor 'w', box [0:549755813888]: 549,755,813,888 bytes, for which there is not enough memory."
    )


def _renamed(header: dict[str, Any]) -> None:
    header["scales"] = header.pop("scale")


HEADERS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "another dtype": (
        lambda header: header["scale"].update(dtype="F16"),
        'Key \'scale\': found {"dtype": "F16", "shape": [6], "data_offsets": [132, 144]}, '
        'needed {"dtype": "BF16", "shape": [6], "data_offsets": [132, 144]}.',
    ),
    "another name": (_renamed, "Key 'scale': found nothing, needed {"),
    "another shape": (lambda header: header["scale"].update(shape=[3, 2]), "Key 'scale': found {"),
    "bytes of another": (lambda header: header["scale"].update(data_offsets=[0, 12]), "Key 'scale': found {"),
    "one more": (
        lambda header: header.update(x={"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}),
        'Key \'x\': found {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, needed nothing.',
    ),
    "deep": (lambda header: header.update(x="(deep)"), "Key 'x': found "),
    "endless": (lambda header: header.update(x=list(range(10_000))), "Key 'x': found [0, 1, 2, "),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_says_something_else_than_the_manifest(directory: Path, name: str) -> None:
    change, expected = HEADERS[name]
    header = header_of(directory)
    change(header)
    write_header(directory, with_length(header))
    message = refused(directory)
    assert message.startswith(
        f"DIR/{data_of(directory).name}: its header and the manifest differ, so that other programs would read "
        f"something else. {expected}"
    )
    assert message.endswith(" Restore the checkpoint from a copy, or resume from another one.")
    assert len(message) < 700


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (
            with_length({})[:7] + b"\x01{}",
            "its header has 72,057,594,037,927,938 bytes by its own length, needed 2 as in",
        ),
        ((5).to_bytes(8, "little") + b"{,,,}", "not JSON: Expecting property name"),
        (with_length([1]), "found [1], needed a mapping."),
        (with_length({"a": "(1e999)"}), "not usable as JSON: 1e999 is more than a number here can be."),
    ],
)
def test_a_header_that_is_none(directory: Path, header: bytes, problem: str) -> None:
    write_header(directory, header)
    assert refused(directory).startswith(f"DIR/{data_of(directory).name}: {problem}")


def test_two_boxes_under_one_key(directory: Path) -> None:
    edited(directory, lambda value: value["tensors"][0]["boxes"][1].update(key="embed[0:2,0:8]"))
    assert refused(directory) == (
        f"DIR/{data_of(directory).name}: tensor 'embed', box [2:4,0:8]: its key 'embed[0:2,0:8]' is taken."
    )


CODES = "\x1b[2J\x07\nintact  elsewhere"


def named(directory: Path) -> None:
    """Gives a checkpoint a tensor, a layout and a stray file whose names would clear a terminal."""

    def change(value: dict[str, Any]) -> None:
        value["tensors"][1]["name"] = CODES
        value["model"] = value["layout"]["name"] = value["tensors"][0]["spec"] = CODES
        value["mesh"][CODES] = 2

    edited(directory, change)
    (directory / "\x1b[2J\n").touch()
    (directory.parent / "\x9b2J").touch()


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_control_characters_are_printed_escaped(directory: Path, verb: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    named(directory)
    main(["ckpt", verb, str(directory.parent)])
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()
    assert "\\x1b[2J" in out
    assert not any(line.startswith("intact  elsewhere") for line in out.splitlines())


def test_control_characters_in_an_error_are_escaped(directory: Path, capsys) -> None:
    named(directory)
    edited(directory, lambda value: value["tensors"][1]["boxes"].clear())
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory)
    assert str(caught.value).isprintable()
    assert "tensor '\\x1b[2J\\x07\\nintact  elsewhere' of shape (6,)" in str(caught.value)
    assert main(["ckpt", "show", str(directory)]) == 1
    out, err = capsys.readouterr()
    assert (out + err).replace("\n", "").isprintable()


def test_a_box_that_is_too_large_is_refused_before_it_is_written(tmp_path: Path) -> None:
    info = TensorInfo(name="w", shape=(TIB,), dtype="uint8")
    owned = OwnedBox(name="w", box=Box.whole(info.shape), array=lambda: pytest.fail("copied"))
    with pytest.raises(CheckpointError) as caught:
        save_checkpoint(tmp_path, point(), [info], [owned])
    assert str(caught.value) == (
        "tensor 'w': the box [0:1099511627776] has 1,099,511,627,776 bytes, needed at most 549,755,813,888. "
        "Save it as several boxes."
    )


@pytest.mark.parametrize("seed", range(3))
def test_a_forged_checkpoint_is_loaded_or_refused(tmp_path: Path, seed: int) -> None:
    """As a program loads one: every tensor, where the manifest is accepted."""
    outcomes: list[str] = []
    for number in range(60):
        out = tmp_path / str(number)
        directory = forged_checkpoint(random.Random(f"{seed}/{number}"), out)
        try:
            latest(out)
            checkpoint = open_checkpoint(directory)
            for name, info in checkpoint.tensors.items():
                assert checkpoint.read_box(name, raw=True).shape == info.shape
            outcomes.append("")
        except InputError as error:
            outcomes.append(str(error))
    assert "" in outcomes
    assert len(set(outcomes)) > 10
    assert "".join(outcomes).isprintable()
