"""Edits of a checkpoint's files after which all digests are right, so that another check must find the edit.

Files of integers are read and written by the safetensors library.

    manifest.json                                   manifest_of, write_manifest, edit_manifest
    boxes.index, part-*.index as arrays             arrays_of, write_arrays, edit_arrays
    boxes.index and part-*.index as JSON values     index_of, write_index, part_of, write_part; edit_boxes keeps both consistent
    any file of these, or the header of a data file write_signed, write_header
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import safe_open
from safetensors.numpy import save as safetensors_bytes

from shardwright.checkpoint.format.dtypes import DTYPES

MANIFEST, INDEX = "manifest.json", "boxes.index"
RAW = {"(1e999)": "1e999", "(deep)": "[" * 900 + "]" * 900, "(long)": "9" * 5000}
"""Texts that stand for values that ``json`` itself does not write."""

Arrays = dict[str, np.ndarray]


def part_file(process: int = 0) -> str:
    return f"part-{process:05d}.index"


def data_file(process: int = 0, number: int = 0) -> str:
    return f"boxes-{process:05d}-{number:05d}.safetensors"


def data_of(folder: Path) -> Path:
    return folder / data_file()


def digest_of(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


# The manifest


def manifest_of(folder: Path) -> Any:
    return json.loads((folder / MANIFEST).read_text())


def write_manifest(folder: Path, value: Any, *, sign: bool = True) -> None:
    """Writes a manifest. With ``sign`` its own digest is right."""
    if isinstance(value, dict) and sign:
        value.pop("manifest_digest", None)
        value["manifest_digest"] = digest_of(text_of(value, separators=(",", ":")).encode())
    path = folder / MANIFEST
    path.unlink()
    path.write_text(text_of(value))


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], object], *, sign: bool = True) -> None:
    value = manifest_of(folder)
    change(value)
    write_manifest(folder, value, sign=sign)


def text_of(value: Any, **options: Any) -> str:
    """The JSON text of a value, with what ``RAW`` stands for; of one that contains itself, an empty mapping's."""
    try:
        text = json.dumps(value, **options)
    except ValueError:
        return "{}"
    for name, raw in RAW.items():
        text = text.replace(json.dumps(name), raw)
    return text


def tensor(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(item for item in value["tensors"] if item["name"] == name)


# Files of integers


def write_signed(folder: Path, name: str, data: bytes) -> None:
    """Replaces the index or a part file, and gives the manifest its size and its digest."""
    path = folder / name
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    value = manifest_of(folder)
    entry = value["index"] if name == INDEX else value["parts"][int(name.split("-")[1].split(".")[0])]
    entry |= {"bytes": len(data), "digest": digest_of(data)}
    write_manifest(folder, value)


def arrays_of(folder: Path, name: str) -> tuple[Arrays, dict[str, str]]:
    """The arrays and the metadata of a file of integers."""
    with safe_open(folder / name, framework="numpy") as file:
        return {key: np.array(file.get_tensor(key)) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def write_arrays(folder: Path, name: str, arrays: Arrays, metadata: dict[str, str]) -> None:
    write_signed(folder, name, safetensors_bytes({k: np.ascontiguousarray(a) for k, a in arrays.items()}, metadata))


def edit_arrays(folder: Path, name: str, change: Callable[[Arrays, dict[str, str]], object]) -> None:
    arrays, metadata = arrays_of(folder, name)
    change(arrays, metadata)
    write_arrays(folder, name, arrays, metadata)


def put(name: str, at: int | slice, value: object) -> Callable[[Arrays], object]:
    """Sets elements of one array."""
    return lambda arrays: arrays[name].__setitem__(at, value)


def made(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Arrays], object]:
    """Makes one array of what it was."""
    return lambda arrays: arrays.update({name: change(arrays[name])})


# The same as JSON values, box by box


def part_of(folder: Path, process: int = 0) -> dict[str, Any]:
    """``{piece_bytes, files: [{bytes, header_bytes, header_digest}], boxes: [{tensor, start, stop, file, offset, digests}]}``."""
    arrays, metadata = arrays_of(folder, part_file(process))
    tensors, piece_bytes = manifest_of(folder)["tensors"], int(metadata["piece_bytes"])
    boxes: list[dict[str, Any]] = []
    corner = piece = 0
    for number, file, offset in zip(*(arrays[key].tolist() for key in ("tensor", "file", "offset")), strict=True):
        dims = len(tensors[number]["shape"])
        start, stop = arrays["corners"][corner : corner + 2 * dims].reshape(2, dims).tolist()
        size = prod(b - a for a, b in zip(start, stop, strict=True)) * DTYPES[tensors[number]["dtype"]].num_bytes
        pieces = -(-size // piece_bytes)
        digests = [bytes(row).hex() for row in arrays["digests"][piece : piece + pieces]]
        boxes.append(
            {"tensor": number, "start": start, "stop": stop, "file": file, "offset": offset, "digests": digests}
        )
        corner, piece = corner + 2 * dims, piece + pieces
    files = [
        {"bytes": size, "header_bytes": header, "header_digest": bytes(digest).hex()}
        for size, header, digest in zip(
            arrays["file_bytes"].tolist(), arrays["header_bytes"].tolist(), arrays["header_digests"], strict=True
        )
    ]
    return {"piece_bytes": piece_bytes, "files": files, "boxes": boxes}


def write_part(folder: Path, part: Any, process: int = 0) -> None:
    """Writes a part as ``part_of`` returns it. The manifest gets the number and the bytes of its files too."""
    boxes, files = part["boxes"], part["files"]
    arrays = {
        "tensor": np.array([box["tensor"] for box in boxes], np.int32),
        "corners": np.array([at for box in boxes for at in (*box["start"], *box["stop"])], np.int64),
        "file": np.array([box["file"] for box in boxes], np.int32),
        "offset": np.array([box["offset"] for box in boxes], np.int64),
        "digests": _digests([digest for box in boxes for digest in box["digests"]]),
        "file_bytes": np.array([file["bytes"] for file in files], np.int64),
        "header_bytes": np.array([file["header_bytes"] for file in files], np.int64),
        "header_digests": _digests([file["header_digest"] for file in files]),
    }
    write_arrays(folder, part_file(process), arrays, {"piece_bytes": str(part["piece_bytes"])})
    total = {"num_files": len(files), "data_bytes": sum(file["bytes"] for file in files)}
    edit_manifest(folder, lambda value: value["parts"][process].update(total))


def index_of(folder: Path) -> list[list[dict[str, Any]]]:
    """For each tensor its boxes: ``{start, stop, part, row}``."""
    arrays, _ = arrays_of(folder, INDEX)
    tensors = manifest_of(folder)["tensors"]
    corners = iter(arrays["corners"].tolist())
    places = iter(zip(arrays["part"].tolist(), arrays["row"].tolist(), strict=True))
    found: list[list[dict[str, Any]]] = []
    for item, count in zip(tensors, arrays["num_boxes"].tolist(), strict=True):
        found.append([])
        for _ in range(count):
            start, stop = ([next(corners) for _ in item["shape"]] for _ in range(2))
            part, row = next(places)
            found[-1].append({"start": start, "stop": stop, "part": part, "row": row})
    return found


def write_index(folder: Path, index: Any) -> None:
    boxes = [box for each in index for box in each]
    arrays = {
        "num_boxes": np.array([len(each) for each in index], np.int64),
        "corners": np.array([at for box in boxes for at in (*box["start"], *box["stop"])], np.int64),
        "part": np.array([box["part"] for box in boxes], np.int32),
        "row": np.array([box["row"] for box in boxes], np.int32),
    }
    write_arrays(folder, INDEX, arrays, {})


def edit_boxes(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits the part of the only process, and writes the index that follows from it."""
    part = part_of(folder)
    change(part)
    write_part(folder, part)
    index: list[list[dict[str, Any]]] = [[] for _ in manifest_of(folder)["tensors"]]
    for row, box in enumerate(part["boxes"]):
        index[box["tensor"]].append({"start": box["start"], "stop": box["stop"], "part": 0, "row": row})
    write_index(folder, [sorted(boxes, key=lambda box: box["start"]) for boxes in index])


def box_of(folder: Path, name: str, number: int = 0) -> dict[str, Any]:
    """Box ``number`` of a tensor in the order of their bytes."""
    names = [item["name"] for item in manifest_of(folder)["tensors"]]
    return [box for box in part_of(folder)["boxes"] if names[box["tensor"]] == name][number]


def _digests(texts: list[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(bytes.fromhex, texts)), np.uint8).reshape(-1, 16)


# Data files


def header_of(folder: Path) -> Any:
    data = data_of(folder).read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_length(value: Any) -> bytes:
    text = text_of(value).encode()
    return len(text).to_bytes(8, "little") + text


def write_header(folder: Path, header: bytes) -> None:
    """Gives the data file another header, and the part what follows from it."""
    part = part_of(folder)
    [file] = part["files"]
    path = data_of(folder)
    data = path.read_bytes()[file["header_bytes"] :]
    for box in part["boxes"]:
        box["offset"] += len(header) - file["header_bytes"]
    part["files"] = [
        {"bytes": len(header) + len(data), "header_bytes": len(header), "header_digest": digest_of(header)}
    ]
    path.write_bytes(header + data)
    write_part(folder, part)


def large_box(folder: Path, num_bytes: int) -> None:
    """A checkpoint of one box without any data on disk, in pieces of 1 GiB."""
    header = with_length({"w": {"dtype": "U8", "shape": [num_bytes], "data_offsets": [0, num_bytes]}})
    data = data_of(folder)
    data.write_bytes(header)
    os.truncate(data, len(header) + num_bytes)
    tensors = [{"name": "w", "shape": [num_bytes], "dtype": "uint8", "spec": ""}]
    edit_manifest(folder, lambda value: value.update(tensors=tensors, piece_bytes=1 << 30))
    box = {"tensor": 0, "start": [0], "stop": [num_bytes], "file": 0, "offset": len(header)}
    file = {"bytes": len(header) + num_bytes, "header_bytes": len(header), "header_digest": digest_of(header)}
    digests = ["0" * 32] * -(-num_bytes // (1 << 30))
    edit = {"piece_bytes": 1 << 30, "files": [file], "boxes": [{**box, "digests": digests}]}
    write_part(folder, edit)
    write_index(folder, [[{"start": [0], "stop": [num_bytes], "part": 0, "row": 0}]])


def edit_own_header(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Edits the header of the index or of a part file itself."""
    data = (folder / name).read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    value = json.loads(data[8:end])
    change(value)
    write_signed(folder, name, with_length(value) + data[end:])
