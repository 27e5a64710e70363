"""The header of a safetensors file: eight bytes (its length, little-endian), then JSON. Elements follow."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.fields import parse_json
from shardwright.storage.url import Place

METADATA = "__metadata__"
"""The key of a header that names no tensor."""
MAX_HEADER_BYTES = 8 + 100_000_000
"""What the safetensors library reads."""

Tensors = Iterable[tuple[str, str, Sequence[int], int]]
"""The key, the dtype (a key of ``DTYPES``), the shape and the bytes of each tensor, in the order of their elements."""


def safetensors_header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, its elements aligned to eight bytes."""
    text = json.dumps({METADATA: dict(metadata), **_entries(tensors)}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def check_header(path: Place, header: bytes, tensors: Tensors) -> None:
    """Compares the header of a file with what the part file says of it: other programs read the header alone.

    Raises CheckpointError with both entries of the first key that differs.
    """
    if int.from_bytes(header[:8], "little") != len(header) - 8:
        raise CheckpointError(
            f"{path}: its header has {int.from_bytes(header[:8], 'little'):,} bytes by its own length, "
            f"needed {len(header) - 8:,} as in the part file."
        )
    found = {key: entry for key, entry in parse_json(header[8:], path).mapping().items() if key != METADATA}
    needed = _entries(tensors)
    if found == needed:
        return
    key = next(key for key in (*needed, *found) if found.get(key) != needed.get(key))
    raise CheckpointError(
        f"{path}: its header and the part file differ, so that other programs would read something else. "
        f"Key '{key}': found {_short(found.get(key))}, needed {_short(needed.get(key))}. "
        f"Restore the checkpoint from a copy, or resume from another one."
    )


def _entries(tensors: Tensors) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    offset = 0
    for key, dtype, shape, num_bytes in tensors:
        entries[key] = {
            "dtype": DTYPES[dtype].safetensors,
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    return entries


def _short(entry: Any) -> str:
    try:
        text = "nothing" if entry is None else json.dumps(entry)
    except RecursionError:
        text = "values that are nested too deeply"
    return text if len(text) <= 200 else text[:197] + "..."
