"""The safetensors files of an exported folder. They have their full size from the start, and are written in place.

So each box of a checkpoint is read once, wherever its elements go, and disk space that lacks is known before the first write.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.header import safetensors_header
from shardwright.files.replaced import replace_text
from shardwright.interop.hugging_face.weights.files.folder import INDEX, SINGLE
from shardwright.interop.hugging_face.weights.mapping import PublishedTensor

WRITTEN = {"format": "pt"}
"""What transformers requires of a file's metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file: its header, and where the elements of each tensor begin."""

    name: str
    header: bytes
    offsets: Mapping[str, int]
    num_bytes: int


def shards_of(tensors: Sequence[PublishedTensor], dtypes: Mapping[str, str], max_bytes: int) -> tuple[Shard, ...]:
    """The files of tensors whose dtypes are given by name. A file is as large as ``max_bytes`` allows; one tensor may exceed it."""
    groups: list[list[PublishedTensor]] = [[]]
    held = 0
    for tensor in tensors:
        num_bytes = _num_bytes(tensor, dtypes)
        if groups[-1] and held + num_bytes > max_bytes:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += num_bytes
    stem = SINGLE.removesuffix(".safetensors")
    names = [f"{stem}-{place:05d}-of-{len(groups):05d}.safetensors" for place in range(1, len(groups) + 1)]
    return tuple(
        _shard(name, group, dtypes) for name, group in zip(names if len(groups) > 1 else [SINGLE], groups, strict=True)
    )


def _shard(name: str, tensors: Sequence[PublishedTensor], dtypes: Mapping[str, str]) -> Shard:
    # Wide elements first, so that all are aligned.
    ordered = sorted(tensors, key=lambda tensor: -DTYPES[dtypes[tensor.name]].num_bytes)
    sizes = [_num_bytes(tensor, dtypes) for tensor in ordered]
    rows = [(one.name, dtypes[one.name], one.shape, size) for one, size in zip(ordered, sizes, strict=True)]
    header = safetensors_header(rows, WRITTEN)
    starts = accumulate(sizes, initial=len(header))
    return Shard(
        name=name,
        header=header,
        offsets={tensor.name: start for tensor, start in zip(ordered, starts, strict=False)},
        num_bytes=len(header) + sum(sizes),
    )


def index_text(shards: Sequence[Shard]) -> str:
    """The index of several files."""
    weight_map = {name: shard.name for shard in shards for name in shard.offsets}
    size = sum(shard.num_bytes - len(shard.header) for shard in shards)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"


@contextmanager
def written(
    folder: Path, shards: Sequence[Shard], tensors: Sequence[PublishedTensor], dtypes: Mapping[str, str]
) -> Iterator[Callable[[str], np.ndarray]]:
    """Yields the elements of any tensor by name, flat, as unsigned integers that can be assigned. Durable at the end.

    Raises OSError, before any element is written, where the files do not fit on the disk.
    """
    mapped = {shard.name: _created(folder / shard.name, shard) for shard in shards}
    file_of = {name: shard for shard in shards for name in shard.offsets}
    sizes = {tensor.name: tensor.size for tensor in tensors}

    def elements(name: str) -> np.ndarray:
        shard, bits = file_of[name], DTYPES[dtypes[name]].bits
        start = shard.offsets[name]
        return mapped[shard.name][start : start + sizes[name] * bits.itemsize].view(bits)

    yield elements
    if len(shards) > 1:
        replace_text(folder / INDEX, index_text(shards))
    for data in mapped.values():
        data.flush()


def _created(path: Path, shard: Shard) -> np.memmap:
    with path.open("xb") as file:
        # Without space for all of it, writing through the mapping would end the process with a signal.
        os.posix_fallocate(file.fileno(), 0, shard.num_bytes)
        file.write(shard.header)
    return np.memmap(path, np.uint8, "r+")


def _num_bytes(tensor: PublishedTensor, dtypes: Mapping[str, str]) -> int:
    return tensor.size * DTYPES[dtypes[tensor.name]].num_bytes
