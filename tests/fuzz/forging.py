"""Checkpoints that were forged or edited: manifest and headers disagree, are extreme, or are no files, and all digests are right."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwright.checkpoint.format.manifest import digest_of
from tests.checkpoint.states import save, small_state
from tests.fuzz.mutating import damaged_value, places

TIB = 1 << 40
RAW = {"(1e999)": "1e999", "(deep)": "[" * 900 + "]" * 900, "(long)": "9" * 5000}
"""Texts that stand for values that ``json`` itself does not write."""

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
    draw.choice(FORGERIES)(draw, folder)
    if draw.random() < 0.3:
        draw.choice(FURTHER)(draw, folder)
    return folder


def write_manifest(folder: Path, value: Any) -> None:
    """Writes a manifest whose own digest is right."""
    if isinstance(value, dict):
        value.pop("manifest_digest", None)
        value["manifest_digest"] = digest_of(text_of(value, separators=(",", ":")).encode())
    path = folder / "manifest.json"
    path.unlink()
    path.write_text(text_of(value))


def text_of(value: Any, **options: Any) -> str:
    """The JSON text of a value, with what ``RAW`` stands for; of one that contains itself, an empty mapping's."""
    try:
        text = json.dumps(value, **options)
    except ValueError:
        return "{}"
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


def write_header(folder: Path, header: bytes) -> None:
    """Gives the data file another header, and the manifest what follows from it."""
    value = manifest_of(folder)
    file = value["files"][0]
    path = folder / file["name"]
    data = path.read_bytes()[file["header_bytes"] :]
    longer = len(header) - file["header_bytes"]
    file |= {
        "header_bytes": len(header),
        "header_digest": digest_of(header),
        "bytes": file["bytes"] + longer,
    }
    for tensor in value["tensors"]:
        for box in tensor["boxes"]:
            box["offset"] += longer
    path.write_bytes(header + data)
    write_manifest(folder, value)


def with_length(value: Any) -> bytes:
    text = text_of(value).encode()
    return len(text).to_bytes(8, "little") + text


def header_of(folder: Path) -> Any:
    data = data_of(folder).read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / "manifest.json").read_text())


def data_of(folder: Path) -> Path:
    return folder / "boxes-00000-00000.safetensors"


def large_box(folder: Path, num_bytes: int) -> None:
    """A checkpoint of one box without any data on disk."""
    header = with_length({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}})
    data = data_of(folder)
    data.write_bytes(header)
    os.truncate(data, len(header) + num_bytes)
    file = {
        "name": data.name,
        "bytes": len(header) + num_bytes,
        "header_bytes": len(header),
        "header_digest": digest_of(header),
    }
    box = {
        "start": [0],
        "stop": [num_bytes],
        "file": data.name,
        "key": "w",
        "offset": len(header),
        "bytes": num_bytes,
        "digest": "0" * 32,
    }
    tensor = {"name": "w", "shape": [num_bytes], "dtype": "uint8", "spec": "", "boxes": [box]}
    write_manifest(folder, {**manifest_of(folder), "files": [file], "tensors": [tensor]})


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


def _header(draw: random.Random, folder: Path) -> None:
    header = header_of(folder)
    if draw.random() < 0.3:
        owner, key = draw.choice(list(places(header)))
        owner[key] = draw.choice(EXTREMES)()
    else:
        header = damaged_value(draw, header)
    write_header(folder, with_length(header))


def _replaced(draw: random.Random, folder: Path) -> None:
    path = draw.choice((folder / "manifest.json", data_of(folder)))
    if path.is_file():
        no_file(path, draw.choice(KINDS))


def _large(draw: random.Random, folder: Path) -> None:
    large_box(folder, draw.choice((TIB, 8 * TIB, 1 << 26)))


def _added(draw: random.Random, folder: Path) -> None:
    name = draw.choice(("notes.txt", "part-00001.json", ".hidden", "\x1b[2J", "a\nb", "boxes-00001-00000.safetensors"))
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


FURTHER = (_edited, _extreme, _replaced, _added)
FORGERIES = (_edited, _edited, _extreme, _extreme, _header, _header, _large, *FURTHER)
