"""Checkpoints that were forged or edited: manifest, index, parts and headers disagree, are extreme, or are no files, and all digests are right."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from tests.checkpoint.editing import (
    INDEX,
    MANIFEST,
    RAW,
    arrays_of,
    data_of,
    header_of,
    index_of,
    large_box,
    part_file,
    part_of,
    with_length,
    write_arrays,
    write_header,
    write_index,
    write_manifest,
    write_part,
    write_signed,
)
from tests.checkpoint.states import save, small_state
from tests.fuzz.mutating import damaged_value, places

TIB = 1 << 40
EXTREMES: tuple[Callable[[], Any], ...] = (
    *(lambda text=text: text for text in RAW),
    lambda: 10**30,
    lambda: 1 << 63,
    lambda: (1 << 63) - 1,
    lambda: TIB,
    lambda: [1] * 100_000,
    lambda: [10**30] * 3,
    lambda: [1 << 40, 0, 1 << 40],
    lambda: "\x1b[2J\x1b]0;title\x07\r\n",
    lambda: "w\nintact   run/checkpoints/step-00000020",
    lambda: "\ud800",
    lambda: "\u202e" * 3,
    lambda: {"a": [[[[]]]] * 3},
)


def forged_checkpoint(draw: random.Random, out: Path) -> Path:
    """Saves a small checkpoint, forges it, and returns its directory."""
    folder = save(out, small_state())
    _forge(draw, folder, FORGERIES)
    if draw.random() < 0.3:
        _forge(draw, folder, FURTHER)
    return folder


def _forge(draw: random.Random, folder: Path, forgeries: tuple[Callable[[random.Random, Path], None], ...]) -> None:
    try:
        draw.choice(forgeries)(draw, folder)
    except UNWRITABLE:
        # No file of integers has these values. The manifest has others, which is a forgery too.
        _edited(draw, folder)


def no_file(path: Path, kind: str) -> None:
    """Puts something else where a file was."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "sparse":
        path.touch()
        os.truncate(path, TIB)
    elif kind == "loop":
        path.symlink_to(path.name)
    else:
        path.symlink_to(kind)


KINDS = ("pipe", "folder", "sparse", "loop", "/dev/zero", "/dev/null", "/dev/full", "nowhere")


def _edited(draw: random.Random, folder: Path) -> None:
    if (value := _readable(folder)) is not None:
        write_manifest(folder, damaged_value(draw, value))


def _extreme(draw: random.Random, folder: Path) -> None:
    if (value := _readable(folder)) is not None:
        owner, key = draw.choice(list(places(value)))
        owner[key] = draw.choice(EXTREMES)()
        write_manifest(folder, value)


def _boxes(draw: random.Random, folder: Path) -> None:
    """Changes values of the part, of the index or of both alike."""
    for read, write in draw.choice((PARTS, INDICES, (*PARTS, *INDICES))):
        value = read(folder)
        if draw.random() < 0.3:
            owner, key = draw.choice(list(places(value)))
            owner[key] = draw.choice(INTEGERS)
        else:
            value = damaged_value(draw, value)
        write(folder, value)


def _arrays(draw: random.Random, folder: Path) -> None:
    """Changes the arrays of the part or of the index: their elements, lengths, shapes, dtypes and names."""
    name = draw.choice((INDEX, part_file()))
    arrays, metadata = arrays_of(folder, name)
    for _ in range(draw.choice((1, 1, 2, 4))):
        key = draw.choice(list(arrays))
        array, kind = arrays[key], draw.randrange(7)
        if kind == 0 and array.size:
            array.reshape(-1)[draw.randrange(array.size)] = draw.choice(EDGES[array.dtype.itemsize])
        elif kind == 1:
            arrays[key] = array[: draw.randrange(len(array) + 1)]
        elif kind == 2:
            arrays[key] = np.concatenate([array, array[: draw.randrange(len(array) + 1)]])
        elif kind == 3:
            arrays[key] = array.astype(draw.choice((np.int64, np.int32, np.uint8, np.float32, np.uint64)))
        elif kind == 4:
            arrays[key] = draw.choice((array[..., None], array[None], array.reshape(-1), array[::-1]))
        elif kind == 5:
            arrays[draw.choice(("x", "piece_bytes", key + "\x1b[2J", ""))] = arrays.pop(key)
            break
        else:
            metadata["piece_bytes"] = draw.choice(
                ("", "0", "-1", "1", "9" * 5000, "1e9", "١", str(1 << 30), str(1 << 64))
            )
    write_arrays(folder, name, arrays, metadata)


def _bytes(draw: random.Random, folder: Path) -> None:
    """Changes the bytes of the part or of the index: its length, its header, or all."""
    name = draw.choice((INDEX, part_file()))
    data = bytearray((folder / name).read_bytes())
    kind = draw.randrange(4)
    if kind == 0:
        data = data[: draw.randrange(len(data))]
    elif kind == 1:
        data[:8] = draw.choice((0, 2, 1 << 62, (1 << 64) - 1, len(data) - 8, len(data) - 7)).to_bytes(8, "little")
    elif kind == 2:
        length = int.from_bytes(data[:8], "little")
        header = damaged_value(draw, json.loads(data[8 : 8 + length]))
        data = bytearray(with_length(header)) + data[8 + length :]
    else:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    write_signed(folder, name, bytes(data))


def _header(draw: random.Random, folder: Path) -> None:
    header = header_of(folder)
    if draw.random() < 0.3:
        owner, key = draw.choice(list(places(header)))
        owner[key] = draw.choice(EXTREMES)()
    else:
        header = damaged_value(draw, header)
    write_header(folder, with_length(header))


def _replaced(draw: random.Random, folder: Path) -> None:
    path = draw.choice((folder / MANIFEST, folder / INDEX, folder / part_file(), data_of(folder)))
    if path.is_file():
        no_file(path, draw.choice(KINDS))


def _large(draw: random.Random, folder: Path) -> None:
    large_box(folder, draw.choice((TIB, 8 * TIB, 1 << 26)))


def _added(draw: random.Random, folder: Path) -> None:
    name = draw.choice(
        (
            "notes.txt",
            "part-00001.index",
            "part-00001.json",
            ".hidden",
            "\x1b[2J",
            "a\nb",
            "boxes-00001-00000.safetensors",
        )
    )
    no_file(draw.choice((folder, folder.parent)) / name, draw.choice(KINDS))


def _readable(folder: Path) -> Any:
    """The manifest, if an earlier forgery has left it one."""
    path = folder / "manifest.json"
    if path.is_symlink() or not path.is_file() or path.stat().st_size > 1 << 24:
        return None
    text = path.read_text()
    if any(raw in text for raw in RAW.values()):
        return None
    value = json.loads(text)
    return value if list(places(value)) else None


PARTS, INDICES = ((part_of, write_part),), ((index_of, write_index),)
INTEGERS = (-1, 0, 1, 7, (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63), TIB)
EDGES = {1: (0, 255), 4: INTEGERS[:6], 8: INTEGERS}
UNWRITABLE = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    SafetensorError,
    OSError,
    StopIteration,
)
"""What NumPy and the safetensors library raise for values that no array holds, and after an earlier forgery."""
FURTHER = (_edited, _extreme, _replaced, _added)
FORGERIES = (
    *(_edited, _edited, _extreme, _extreme, _header, _header, _large),
    *(_boxes, _boxes, _boxes, _arrays, _arrays, _arrays, _bytes, _bytes),
    *FURTHER,
)
