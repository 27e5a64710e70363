"""The header of a safetensors file, validated: which tensor is where. Format: eight bytes of length, JSON, elements."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from shardwright.checkpoint.format.dtypes import DTYPES, Dtype
from shardwright.checkpoint.format.fields import Field, parse_json
from shardwright.core.findings.bounds import within
from shardwright.core.findings.errors import InputError

MAX_HEADER_BYTES = 100_000_000
"""What the safetensors library reads."""
POINTER = b"version https://git-lfs.github.com/"
"""What the files of a clone begin with where Git LFS has fetched none."""

BY_CODE = {dtype.safetensors: dtype for dtype in DTYPES.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTensor:
    """A tensor in a file: its elements are ``num_bytes`` bytes at ``offset``. ``dtype``: the name in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int

    @property
    def known(self) -> Dtype:
        return BY_CODE[self.dtype]

    def read(self, start: int, size: int) -> np.ndarray:
        """``size`` elements from the flat index ``start``, as unsigned integers. Raises InputError where they cannot be read."""
        bits = self.known.bits
        assert 0 <= start <= start + size <= prod(self.shape), (self.name, start, size)
        try:
            found = np.fromfile(self.file, bits, size, offset=self.offset + start * bits.itemsize)
        except OSError as error:
            raise InputError(f"{self.file}: '{self.name}' cannot be read: {error.strerror or error}.") from None
        if found.size < size:
            raise InputError(f"{self.file}: the file became shorter while '{self.name}' was read.")
        return found


def read_header(path: Path) -> dict[str, FoundTensor]:
    """Every tensor of a file, by name. Raises InputError for a file that is not a complete safetensors file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a regular file. A safetensors file is needed.")
        with path.open("rb") as file:
            start = file.read(len(POINTER))
            num = int.from_bytes(start[:8], "little")
            if start == POINTER:
                raise InputError(
                    f"{path}: it is a pointer of Git LFS, and not the file itself. `git lfs pull` in its folder fetches the files."
                )
            if status.st_size < 8 or num > min(MAX_HEADER_BYTES, status.st_size - 8):
                raise InputError(
                    f"{path}: not a complete safetensors file: it has {status.st_size:,} bytes, and its first eight say that "
                    f"a header of {num:,} follows. Fetch it again."
                )
            file.seek(8)
            data = file.read(num)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file. Fetch it again.") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}.") from None
    within(f"{path}: the number of its tensors", data.count(b'"data_offsets"'), "tensors")
    top = parse_json(data, path)
    found = [_tensor(path, top[name], 8 + num) for name in top.mapping() if name != "__metadata__"]
    _check_without_gap(path, found, 8 + num, status.st_size)
    return {tensor.name: tensor for tensor in found}


def _tensor(path: Path, item: Field, first: int) -> FoundTensor:
    name = item.label
    item = item.labelled(f"tensor '{name}'")
    shape, dtype = item["shape"].integers(), item["dtype"].text()
    start, end = item["data_offsets"].integers(2)
    size = end - start
    if dtype in BY_CODE and size != prod(shape) * BY_CODE[dtype].num_bytes:
        raise item["data_offsets"].error(
            f"found {size:,} bytes, needed {prod(shape) * BY_CODE[dtype].num_bytes:,} for {dtype} {shape}."
        )
    return FoundTensor(name=name, file=path, shape=shape, dtype=dtype, offset=first + start, num_bytes=size)


def _check_without_gap(path: Path, tensors: list[FoundTensor], first: int, file_bytes: int) -> None:
    end = first
    for tensor in sorted(tensors, key=lambda one: (one.offset, one.num_bytes)):
        if tensor.offset != end:
            raise InputError(
                f"{path}: '{tensor.name}' starts at byte {tensor.offset:,}, needed {end:,}. Fetch it again."
            )
        end += tensor.num_bytes
    if end != file_bytes:
        raise InputError(
            f"{path}: found {file_bytes:,} bytes, needed {end:,} by its header: the file is incomplete or damaged. Fetch it again."
        )
