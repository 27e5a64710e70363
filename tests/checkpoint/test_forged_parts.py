"""Forged part files, whose digests are right: one message in bounded time and memory, never a traceback."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from shardwright.checkpoint import CheckpointError, open_checkpoint, verify
from shardwright.checkpoint.format import part
from tests.checkpoint.editing import (
    INDEX,
    Arrays,
    data_file,
    edit_arrays,
    edit_boxes,
    edit_manifest,
    edit_own_header,
    made,
    part_file,
    put,
    write_signed,
)
from tests.checkpoint.refusing import limited, refused
from tests.checkpoint.states import save, small_state

PART, DATA = part_file(), data_file()
MOST, LEAST = (1 << 63) - 1, -(1 << 63)
MOST_32, LEAST_32 = (1 << 31) - 1, -(1 << 31)


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    with limited():
        yield


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(tmp_path, small_state())


PART_EDITS: dict[str, tuple[Callable[[Arrays], object], str]] = {
    "tensor that is not there": (put("tensor", 0, 3), f"{PART}: tensor: a box is of none of the 3 tensors."),
    "tensor at the least": (put("tensor", 0, LEAST_32), f"{PART}: tensor: a box is of none of the 3 tensors."),
    "tensor of other dims": (put("tensor", 0, 1), f"{PART}: corners: found 10, needed 8."),
    "corner below 0": (
        put("corners", 0, -4),
        f"{PART}: tensor 'embed': from (-4, 0) to (4, 4) is not a box within the shape (4, 8).",
    ),
    "corner at the most": (
        put("corners", 3, MOST),
        f"{PART}: tensor 'embed': from (0, 0) to (4, {MOST}) is not a box within the shape (4, 8).",
    ),
    "from the least to the most": (
        lambda arrays: arrays["corners"].__setitem__(slice(0, 4), (LEAST, LEAST, MOST, MOST)),
        f"{PART}: tensor 'embed': from ({LEAST}, {LEAST}) to ({MOST}, {MOST}) is not a box within the shape (4, 8).",
    ),
    "another box": (
        lambda arrays: arrays["corners"].__setitem__([3, 5], (8, 0)),
        f"{PART}: tensor 'embed', box [0:4,0:8]: starts at byte 384 of '{DATA}', needed 448",
    ),
    "fewer corners": (made("corners", lambda array: array[:0]), f"{PART}: corners: found 0, needed 10."),
    "file at the most": (
        put("file", 3, MOST_32),
        f"{PART}: file: needed numbers of the 1 files, in ascending order.",
    ),
    "file below 0": (put("file", 0, -1), f"{PART}: file: needed numbers of the 1 files, in ascending order."),
    "file at the least": (
        put("file", 0, LEAST_32),
        f"{PART}: file: needed numbers of the 1 files, in ascending order.",
    ),
    "fewer files": (
        made("file", lambda array: array[:-1]),
        f"{PART}: 'tensor', 'file' and 'offset' do not have the same number of boxes.",
    ),
    "offset below 0": (
        put("offset", 0, LEAST),
        f"{PART}: tensor 'embed', box [0:4,0:4]: starts at byte {LEAST} of '{DATA}', needed 320, where the bytes before it end.",
    ),
    "offset at the most": (
        put("offset", 3, MOST),
        f"{PART}: tensor 'scale', box [0:6]: starts at byte {MOST} of '{DATA}', needed 452, where the bytes before it end.",
    ),
    "bytes of a file below 0": (
        put("file_bytes", 0, -1),
        f"{PART}: file '{DATA}': header and boxes have 464 bytes in total, the listed size is -1.",
    ),
    "bytes of a file at the most": (
        put("file_bytes", 0, MOST),
        f"{PART}: file '{DATA}': header and boxes have 464 bytes in total, the listed size is {MOST}.",
    ),
    "header below 0": (
        put("header_bytes", 0, LEAST),
        f"{PART}: header_bytes: found {LEAST:,}, needed 8 to 100,000,008.",
    ),
    "header at the most": (
        put("header_bytes", 0, MOST),
        f"{PART}: header_bytes: found {MOST:,}, needed 8 to 100,000,008.",
    ),
    "one header more": (
        made("header_bytes", lambda array: np.repeat(array, 2)),
        f"{PART}: 'file_bytes', 'header_bytes' and 'header_digests' do not have the same number of files.",
    ),
    "no files": (
        lambda arrays: arrays.update(
            {name: arrays[name][:0] for name in ("file_bytes", "header_bytes", "header_digests")}
        ),
        f"{PART}: file: needed numbers of the 0 files, in ascending order.",
    ),
    "many files": (
        lambda arrays: arrays.update(
            {name: np.repeat(arrays[name], 300_000, 0) for name in ("file_bytes", "header_bytes", "header_digests")}
        ),
        f"{PART}: file_bytes: found 300,000 files, needed at most 100,000.",
    ),
    "short digests": (
        made("digests", lambda array: array[:, :15]),
        f"{PART}: digests: found (4, 15), needed (4, 16).",
    ),
    "one digest more": (
        made("digests", lambda array: np.concatenate([array, array[:1]])),
        f"{PART}: digests: found (5, 16), needed (4, 16).",
    ),
    "short digests of headers": (
        made("header_digests", lambda array: array[:, 1:]),
        f"{PART}: 'file_bytes', 'header_bytes' and 'header_digests' do not have the same number of files.",
    ),
    "another dtype": (
        made("offset", lambda array: array.astype(np.float64)),
        f"{PART}: offset, dtype: found 'F64', needed 'I64'.",
    ),
    "another shape": (
        made("digests", lambda array: array.reshape(-1)),
        f"{PART}: digests, shape: found [64], needed a list of 2 whole numbers, at least 0 each.",
    ),
    "an array more": (
        lambda arrays: arrays.update({"\x1b[2J": np.zeros(3)}),
        f"{PART}: \\x1b[2J: no such array is known.",
    ),
    "an array fewer": (lambda arrays: arrays.pop("tensor"), f"{PART}: the field 'tensor' is missing."),
}


@pytest.mark.parametrize("name", PART_EDITS)
def test_a_forged_part(directory: Path, name: str) -> None:
    change, expected = PART_EDITS[name]
    edit_arrays(directory, PART, lambda arrays, _: change(arrays))
    message = refused(directory)
    assert message.startswith(f"DIR/{expected}")
    assert message.endswith(".")


@pytest.mark.parametrize("text", ["", "0", "-1", "1e9", " 5", "1_000", "١", "9" * 10, "9" * 5000, "\x1b[2J"])
def test_pieces_of_no_size(directory: Path, text: str) -> None:
    edit_arrays(directory, PART, lambda _, metadata: metadata.update(piece_bytes=text))
    start = f"DIR/{PART}: piece_bytes: found '{text[:40]}'".replace("\x1b", "\\x1b")
    assert refused(directory) == f"{start}, needed a whole number from 1 to 1,073,741,824."


def test_pieces_of_another_size_than_the_manifest_has(directory: Path) -> None:
    """Of one byte, and of so many that a box is still one piece."""
    edit_arrays(directory, PART, lambda _, metadata: metadata.update(piece_bytes="1"))
    assert refused(directory) == f"DIR/{PART}: digests: found (4, 16), needed (144, 16)."
    edit_arrays(directory, PART, lambda _, metadata: metadata.update(piece_bytes="64"))
    assert refused(directory) == (f"DIR/{PART}: has digests of pieces of 64 bytes, and the manifest of 1,048,576.")


def test_metadata_that_is_missing(directory: Path) -> None:
    edit_own_header(directory, PART, lambda header: header.pop("__metadata__"))
    assert refused(directory) == f"DIR/{PART}: the field '__metadata__' is missing."


@pytest.mark.parametrize("name", [INDEX, PART])
def test_a_file_of_any_length(directory: Path, name: str) -> None:
    good = (directory / name).read_bytes()
    incomplete = "bytes, which is not a complete safetensors file."
    for length in (*range(12), 50, len(good) // 2, len(good) - 1):
        write_signed(directory, name, good[:length])
        message = refused(directory)
        assert message == f"DIR/{name}: has {length} {incomplete}" or (length > 8 and "data_offsets: found" in message)
    for length in (1 << 62, (1 << 64) - 1, len(good) - 7):
        write_signed(directory, name, length.to_bytes(8, "little") + good[8:])
        assert refused(directory) == f"DIR/{name}: has {len(good):,} {incomplete}"
    # Elements are then taken for text.
    for length in (0, 1, len(good) - 8):
        write_signed(directory, name, length.to_bytes(8, "little") + good[8:])
        assert refused(directory).startswith(f"DIR/{name}: not JSON: ")
    write_signed(directory, name, good)
    assert verify(directory)["ok"]


def shaped(*shape: int) -> Callable[[dict[str, Any]], object]:
    return lambda header: header["digests"].update(shape=list(shape))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (shaped(1 << 62, 16), "digests, data_offsets: found "),
        (shaped(1 << 62, 1 << 62), "digests, data_offsets: found "),
        (shaped(1 << 63, 16), "digests, shape: found [9223372036854775808, 16], needed at most "),
        (lambda header: header["digests"].update(shape=[1 << 62, 0], data_offsets=[0, 0]), "digests"),
        (
            lambda header: header["digests"].update(data_offsets=[1 << 62, (1 << 62) + 64]),
            "digests, data_offsets: found ",
        ),
        (lambda header: header["digests"].update(data_offsets=[64, 0]), "digests, data_offsets: found "),
        (lambda header: header.update(digests="(deep)"), "digests: found ["),
        (lambda header: header["digests"].update(dtype="(deep)"), "digests, dtype: found ["),
        (lambda header: header["digests"].update(shape="(1e999)"), "not usable as JSON: 1e999 is more than"),
        (lambda header: header["digests"].update(shape="(long)"), "not usable as JSON: Exceeds the limit"),
        (lambda header: header.update(x="(deep)"), "x: no such array is known."),
    ],
)
def test_a_header_of_a_part_with_an_extreme_value(
    directory: Path, change: Callable[[dict[str, Any]], object], problem: str
) -> None:
    edit_own_header(directory, PART, change)
    assert refused(directory).startswith(f"DIR/{PART}: {problem}")


def test_a_value_nested_at_any_depth(directory: Path) -> None:
    """One depth is as much as can be read, and too much for a message that quotes it."""
    data = (directory / PART).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    messages: set[str] = set()
    for depth in range(700, 1100):
        text = json.dumps({**header, "digests": "@"}).replace('"@"', "[" * depth + "]" * depth).encode()
        write_signed(directory, PART, len(text).to_bytes(8, "little") + text + data[end:])
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(directory)
        messages.add(str(caught.value).removeprefix(f"{directory}/{PART}: ")[:30])
    assert "its values are nested too deep" in messages


@pytest.mark.parametrize("name", [INDEX, PART])
def test_a_header_that_is_larger_than_the_memory(directory: Path, name: str) -> None:
    """Of a file of 600 MiB without any data on disk."""
    num_bytes = 600 << 20
    write_signed(directory, name, b"")
    path = directory / name
    path.write_bytes((num_bytes - 8).to_bytes(8, "little"))
    os.truncate(path, num_bytes)
    signed_sparse(directory, name)
    assert refused(directory) == f"DIR/{name}: cannot be read: there is not enough memory."


def signed_sparse(directory: Path, name: str) -> None:
    path = directory / name
    entry = {"bytes": path.stat().st_size, "digest": xxhash.xxh3_128_hexdigest(np.memmap(path, np.uint8, "r").data)}
    edit_manifest(directory, lambda value: (value["index"] if name == INDEX else value["parts"][0]).update(entry))


def test_many_files_of_no_boxes(directory: Path) -> None:
    """As many as may be: the first that is not there ends the check."""
    edit_boxes(
        directory, lambda value: value.update(files=value["files"] + [value["files"][0] | {"bytes": 320}] * 99_999)
    )
    with pytest.raises(CheckpointError, match=r"boxes-00000-00001.safetensors: the file is missing\."):
        open_checkpoint(directory)


def test_the_bytes_of_all_boxes_have_a_limit(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of larger ones would exceed 63 bits."""
    monkeypatch.setattr(part, "MAX_PART_BYTES", 143)
    assert refused(directory) == f"DIR/{PART}: its boxes have 144 bytes, needed at most 143."
