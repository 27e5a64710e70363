"""The tensors and values in the data files of a folder of ``torch.distributed.checkpoint``, one at a time.

Each is what ``torch.save`` has written: a zip archive, whose pickle PyTorch reads with ``weights_only``.
"""

from __future__ import annotations

import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from typing import IO, Any, cast

import numpy as np
import torch

from shardwright.checkpoint import CheckpointError
from shardwright.core.boxes.box import Box
from shardwright.engine_torch.dcp_folder.folder import TRUST, DcpFolder, StoredItem, label_of
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.own_program.shards import raw_of
from shardwright.storage.files import open_regular
from shardwright.storage.system import Opened

MAX_VALUE_BYTES = 1 << 30
_STORAGE = "data/0"
"""The elements of a tensor, among the members of its archive."""


class Section(io.RawIOBase):
    """A range of the bytes of a file, as a file of its own."""

    def __init__(self, file: Opened, start: int, num_bytes: int) -> None:
        self._file, self._start, self._num_bytes, self._at = file, start, num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if self._at < 0:
            raise ValueError("a place before the first byte")
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._num_bytes - self._at)]
        done = 0
        self._file.seek(self._start + self._at)
        while done < len(view):
            count = self._file.readinto(view[done:])
            if not count:
                break
            done += count
        self._at += done
        return done


def read_chunk(folder: DcpFolder, name: str, box: Box) -> tuple[np.ndarray, bool]:
    """The elements of a chunk of a tensor, opaque, and whether they had a digest. It was compared.

    Raises CheckpointError for what is no tensor of its shape and dtype, and for other bytes than those that were saved.
    """
    stored = folder.tensors[name]
    item = stored.chunks[box]
    label = label_of(name, box.start)
    tensor, members = _loaded(folder, label, item, is_tensor=True)
    place = f"{folder.path / item.file}: {label}"
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_quantized:
        raise CheckpointError(f"{place} is no dense tensor, but a {type(tensor).__name__}.")
    if tuple(tensor.shape) != box.shape or tensor.dtype != torch_dtype(stored.dtype):
        raise CheckpointError(
            f"{place}: found {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}, needed {stored.dtype} "
            f"{box.shape}, which the metadata says.",
            code="SW504",
        )
    storage = tensor.untyped_storage()
    elements = members[_STORAGE]
    verifies = _has_digests(members)
    # Not of the tensor: its strides may be others.
    found = zlib.crc32(torch.empty(0, dtype=torch.uint8).set_(storage).numpy().data) if verifies else elements.CRC
    if len(storage) != elements.file_size or found != elements.CRC:
        raise CheckpointError(_other_bytes(place))
    return raw_of(tensor.resolve_conj().resolve_neg()), verifies


def read_value(folder: DcpFolder, name: str) -> Any:
    """A value that is no tensor. Raises CheckpointError for one that only its own classes can read."""
    item = folder.values[name]
    if item.num_bytes > MAX_VALUE_BYTES:
        raise CheckpointError(
            f"{folder.path / item.file}: '{name}' has {item.num_bytes:,} bytes, and a value has at most {MAX_VALUE_BYTES:,}."
        )
    return _loaded(folder, f"'{name}'", item, is_tensor=False)[0]


def _loaded(
    folder: DcpFolder, label: str, item: StoredItem, *, is_tensor: bool
) -> tuple[Any, dict[str, zipfile.ZipInfo]]:
    """What ``torch.save`` was given, and the members of its archive, by their names without the first folder."""
    path = folder.path / item.file
    try:
        with open_regular(path) as file, Section(file, item.offset, item.num_bytes) as section:
            members = _members(f"{path}: {label}", section, item.num_bytes, is_tensor=is_tensor)
            section.seek(0)
            return torch.load(
                cast(IO[bytes], section), map_location="cpu", weights_only=is_tensor or not folder.trusts
            ), members
    except OSError as error:
        raise CheckpointError(f"{path}: {label} cannot be read: {error.strerror or error}.") from error
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(_unreadable(f"{path}: {label}", error)) from error


def _members(place: str, section: Section, num_bytes: int, *, is_tensor: bool) -> dict[str, zipfile.ZipInfo]:
    """The members of an archive. The digests of all are verified, but for the elements of a tensor, which are not read here.

    Raises CheckpointError for a compressed archive, which may have any size: ``torch.save`` compresses nothing.
    """
    try:
        with zipfile.ZipFile(cast(IO[bytes], section)) as archive:
            found = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            stored = all(one.compress_type == zipfile.ZIP_STORED for one in found.values())
            if not stored or sum(one.file_size for one in found.values()) > num_bytes:
                raise CheckpointError(f"{place}: its archive is compressed, which torch.save never does.")
            for name, one in found.items():
                if _has_digests(found) and not (is_tensor and name == _STORAGE):
                    archive.read(one)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError, RuntimeError) as error:
        if "Bad CRC-32" in str(error):
            raise CheckpointError(_other_bytes(place)) from error
        raise CheckpointError(
            f"{place} is nothing that torch.save has written: {error}. The file is damaged, or of another format."
        ) from error
    if is_tensor and _STORAGE not in found:
        raise CheckpointError(f"{place} is no tensor: its archive has no elements.")
    return found


def _has_digests(members: Mapping[str, zipfile.ZipInfo]) -> bool:
    """Whether ``torch.save`` has computed them: ``torch.serialization.set_crc32_options(False)`` leaves zeros."""
    return any(one.CRC for one in members.values())


def _other_bytes(place: str) -> str:
    return (
        f"{place}: its bytes are not those that torch.save has written: they do not match their CRC-32. The file was damaged "
        f"since. Restore it from a copy, or import another step."
    )


def _unreadable(place: str, error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, pickle.UnpicklingError):
        # PyTorch's message says in one of its lines which class it is.
        named = next((line for line in lines if "GLOBAL" in line or "global" in line), lines[0]).strip()
        return (
            f"{place} is a pickle of more than tensors and plain values, and was not read: {named} Leave it out with "
            f"--leave-out, or, if you trust who wrote it, give {TRUST}."
        )
    return f"{place} cannot be read: {type(error).__name__}: {lines[0]}."
