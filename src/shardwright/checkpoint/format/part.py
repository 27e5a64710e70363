"""The part file of one process: the boxes that it has written, where each is stored, and the digests of their pieces."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from shardwright.checkpoint.format.arrays import arrays_bytes, read_arrays
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.header import MAX_HEADER_BYTES, METADATA, Tensors
from shardwright.checkpoint.format.manifest import TensorInfo
from shardwright.checkpoint.format.pieces import DIGEST_BYTES, MAX_PIECE_BYTES
from shardwright.core.boxes.box import Box
from shardwright.storage.url import Place

DATA_NAME = re.compile(r"boxes-([0-9]{5,18})-([0-9]{5,18})\.safetensors")
PIECE_NUMBER = re.compile(r"[0-9]{1,10}")
MAX_BOX_BYTES = 1 << 39
"""512 GiB: more than one process holds of a tensor."""
MAX_PART_BYTES = 1 << 60
"""Of all boxes of one process."""
MAX_FILES = 100_000
"""Data files of one process."""
ARRAYS = {
    "tensor": ("int32", 1),
    "corners": ("int64", 1),
    "file": ("int32", 1),
    "offset": ("int64", 1),
    "digests": ("uint8", 2),
    "file_bytes": ("int64", 1),
    "header_bytes": ("int64", 1),
    "header_digests": ("uint8", 2),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InfoTable:
    """The tensors of a checkpoint as arrays, made once for all parts.

    ``num_dims`` and ``widths`` (bytes of an element): int64 (tensors,). ``shapes``: by a number of dims, int64 (tensors with this
    number, dims), in which a tensor is row ``row``, int64 (tensors,).
    """

    infos: tuple[TensorInfo, ...]
    num_dims: np.ndarray
    widths: np.ndarray
    row: np.ndarray
    shapes: Mapping[int, np.ndarray]

    @classmethod
    def of(cls, infos: Sequence[TensorInfo]) -> InfoTable:
        shapes: dict[int, list[tuple[int, ...]]] = {}
        rows: list[int] = []
        for info in infos:
            same = shapes.setdefault(len(info.shape), [])
            rows.append(len(same))
            same.append(info.shape)
        return cls(
            infos=tuple(infos),
            num_dims=np.array([len(info.shape) for info in infos], np.int64),
            widths=np.array([DTYPES[info.dtype].num_bytes for info in infos], np.int64),
            row=np.array(rows, np.int64),
            shapes={num: np.array(same, np.int64).reshape(len(same), num) for num, same in shapes.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """One data file. ``header_digest`` is of its first ``header_bytes`` bytes; boxes fill the rest without a gap."""

    name: str
    num_bytes: int
    header_bytes: int
    header_digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredBox:
    """One box of a tensor: ``num_bytes`` bytes at ``offset`` of ``file``. ``digests``: of its pieces, uint8 (pieces, 16)."""

    info: TensorInfo
    box: Box
    file: str
    offset: int
    num_bytes: int
    digests: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """The boxes of one process as arrays, in the order of their bytes: row i is box i.

    ``tensor``: int32 (boxes,), number of the tensor in the manifest. ``first_corner``: int64 (boxes,), where a box begins in
    ``corners``, int64 (...,), which has the start and then the stop of each box. ``file``: int32 (boxes,). ``offset``:
    int64 (boxes,). ``num_bytes``: int64 (boxes,). ``first_piece``: int64 (boxes,), where a box begins in ``digests``.
    """

    process: int
    files: tuple[StoredFile, ...]
    tensor: np.ndarray
    corners: np.ndarray
    first_corner: np.ndarray
    file: np.ndarray
    offset: np.ndarray
    num_bytes: np.ndarray
    digests: np.ndarray
    first_piece: np.ndarray

    def __len__(self) -> int:
        return len(self.tensor)

    def rows_of(self, number: int) -> range:
        """The boxes of file ``number``: they follow each other."""
        start, stop = np.searchsorted(self.file, [number, number + 1]).tolist()
        return range(start, stop)

    def box(self, row: int, infos: Sequence[TensorInfo]) -> StoredBox:
        info, first = infos[int(self.tensor[row])], int(self.first_corner[row])
        num_dims, num_bytes = len(info.shape), int(self.num_bytes[row])
        corner = self.corners[first : first + 2 * num_dims].tolist()
        piece = int(self.first_piece[row])
        end = int(self.first_piece[row + 1]) if row + 1 < len(self) else len(self.digests)
        return StoredBox(
            info=info,
            box=Box(tuple(corner[:num_dims]), tuple(corner[num_dims:])),
            file=self.files[int(self.file[row])].name,
            offset=int(self.offset[row]),
            num_bytes=num_bytes,
            digests=self.digests[piece:end],
        )


def part_name(process: int) -> str:
    return f"part-{process:05d}.index"


def declared_name(process: int) -> str:
    return f"declared-{process:05d}.json"


def data_name(process: int, number: int) -> str:
    return f"boxes-{process:05d}-{number:05d}.safetensors"


def part_bytes(files: Sequence[StoredFile], boxes: Sequence[tuple[int, int, StoredBox]], piece_bytes: int) -> bytes:
    """A part file. ``boxes``: the number of the tensor, the number of the file and the box, in the order of their bytes."""
    digests = [box.digests for _, _, box in boxes]
    arrays = {
        "tensor": np.array([tensor for tensor, _, _ in boxes], np.int32),
        "corners": np.array([at for _, _, box in boxes for at in (*box.box.start, *box.box.stop)], np.int64),
        "file": np.array([file for _, file, _ in boxes], np.int32),
        "offset": np.array([box.offset for _, _, box in boxes], np.int64),
        "digests": np.concatenate(digests) if digests else np.zeros((0, DIGEST_BYTES), np.uint8),
        "file_bytes": np.array([file.num_bytes for file in files], np.int64),
        "header_bytes": np.array([file.header_bytes for file in files], np.int64),
        "header_digests": np.frombuffer(b"".join(file.header_digest for file in files), np.uint8).reshape(
            -1, DIGEST_BYTES
        ),
    }
    return arrays_bytes(arrays, {"piece_bytes": str(piece_bytes)})


def read_part(path: Place, data: bytes, process: int, table: InfoTable) -> tuple[Part, int]:
    """The part of one process from the bytes of its file, and the size of its pieces. All its numbers fit together.

    Raises CheckpointError: SW501 for a box that exceeds its tensor, else SW503.
    """
    arrays, metadata = read_arrays(path, data, ARRAYS)
    text = metadata.get("piece_bytes", "")
    if not PIECE_NUMBER.fullmatch(text) or not 1 <= (piece_bytes := int(text)) <= MAX_PIECE_BYTES:
        raise CheckpointError(
            f"{path}: piece_bytes: found '{text[:40]}', needed a whole number from 1 to {MAX_PIECE_BYTES:,}."
        )
    files = _files(path, arrays, process)
    tensor = arrays["tensor"]
    if len(tensor) and not 0 <= tensor.min() <= tensor.max() < len(table.infos):
        raise CheckpointError(f"{path}: tensor: a box is of none of the {len(table.infos)} tensors.")
    if not len(tensor) == len(arrays["file"]) == len(arrays["offset"]):
        raise CheckpointError(f"{path}: 'tensor', 'file' and 'offset' do not have the same number of boxes.")
    num_dims = table.num_dims[tensor]
    first_corner = _starts(2 * num_dims)
    if len(arrays["corners"]) != 2 * num_dims.sum():
        raise CheckpointError(f"{path}: corners: found {len(arrays['corners']):,}, needed {2 * num_dims.sum():,}.")
    num_bytes = _num_bytes(path, tensor, arrays["corners"], first_corner, table)
    pieces = -(-num_bytes // piece_bytes)
    if arrays["digests"].shape != (pieces.sum(), DIGEST_BYTES):
        raise CheckpointError(
            f"{path}: digests: found {arrays['digests'].shape}, needed {(int(pieces.sum()), DIGEST_BYTES)}."
        )
    part = Part(
        process=process,
        files=files,
        tensor=tensor,
        corners=arrays["corners"],
        first_corner=first_corner,
        file=arrays["file"],
        offset=arrays["offset"],
        num_bytes=num_bytes,
        digests=arrays["digests"],
        first_piece=_starts(pieces),
    )
    _check_bytes_of_files(path, part, table)
    return part, piece_bytes


def _files(path: Place, arrays: dict[str, np.ndarray], process: int) -> tuple[StoredFile, ...]:
    sizes, headers, digests = arrays["file_bytes"], arrays["header_bytes"], arrays["header_digests"]
    if not len(sizes) == len(headers) == len(digests) or digests.shape[1:] != (DIGEST_BYTES,):
        raise CheckpointError(
            f"{path}: 'file_bytes', 'header_bytes' and 'header_digests' do not have the same number of files."
        )
    if len(sizes) > MAX_FILES:
        raise CheckpointError(f"{path}: file_bytes: found {len(sizes):,} files, needed at most {MAX_FILES:,}.")
    for size in headers.tolist():
        if not 8 <= size <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path}: header_bytes: found {size:,}, needed 8 to {MAX_HEADER_BYTES:,}.")
    return tuple(
        StoredFile(
            name=data_name(process, number),
            num_bytes=size,
            header_bytes=header,
            header_digest=digests[number].tobytes(),
        )
        for number, (size, header) in enumerate(zip(sizes.tolist(), headers.tolist(), strict=True))
    )


def _num_bytes(
    path: Place, tensor: np.ndarray, corners: np.ndarray, first_corner: np.ndarray, table: InfoTable
) -> np.ndarray:
    """The bytes of every box. Raises CheckpointError for one that exceeds its tensor or is too large."""
    num_bytes = np.zeros(len(tensor), np.int64)
    # All boxes with one number of dims at a time: a part has boxes of hundreds of tensors.
    for num_dims, all_shapes in table.shapes.items():
        rows = np.flatnonzero(table.num_dims[tensor] == num_dims)
        shapes = all_shapes[table.row[tensor[rows]]]
        found = corners[first_corner[rows][:, None] + np.arange(2 * num_dims)]
        starts, stops = found[:, :num_dims], found[:, num_dims:]
        good = ((starts >= 0) & (starts < stops) & (stops <= shapes)).all(axis=1)
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            info = table.infos[int(tensor[rows[bad]])]
            raise CheckpointError(
                f"{path}: tensor '{info.name}': from {tuple(starts[bad].tolist())} to {tuple(stops[bad].tolist())} is not a box "
                f"within the shape {info.shape}.",
                code="SW501",
            )
        # Within a shape whose bytes fit into 63 bits.
        num_bytes[rows] = (stops - starts).prod(axis=1) * table.widths[tensor[rows]]
    if len(tensor) and num_bytes.max() > MAX_BOX_BYTES:
        info = table.infos[int(tensor[num_bytes.argmax()])]
        raise CheckpointError(
            f"{path}: tensor '{info.name}': a box has {num_bytes.max():,} bytes, needed at most {MAX_BOX_BYTES:,}.",
            code="SW501",
        )
    # As floating-point numbers, since a sum of many boxes might exceed 63 bits.
    if (total := num_bytes.sum(dtype=np.float64)) > MAX_PART_BYTES:
        raise CheckpointError(f"{path}: its boxes have {total:,.0f} bytes, needed at most {MAX_PART_BYTES:,}.")
    return num_bytes


def _check_bytes_of_files(path: Place, part: Part, table: InfoTable) -> None:
    """Checks that every byte of every file belongs to its header or to exactly one box: a digest covers each byte."""
    if len(part) and not (
        part.file.min() >= 0 and part.file.max() < len(part.files) and (np.diff(part.file) >= 0).all()
    ):
        raise CheckpointError(f"{path}: file: needed numbers of the {len(part.files)} files, in ascending order.")
    headers = np.array([file.header_bytes for file in part.files], np.int64)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(part.num_bytes)])
    first = before[np.searchsorted(part.file, np.arange(len(headers)))]
    ends = headers + before[np.searchsorted(part.file, np.arange(len(headers)), side="right")] - first
    needed = headers[part.file] + before[:-1] - first[part.file]
    wrong = np.flatnonzero(part.offset != needed)
    if len(wrong):
        row = int(wrong[0])
        stored = part.box(row, table.infos)
        raise CheckpointError(
            f"{path}: tensor '{stored.info.name}', box [{stored.box}]: starts at byte {stored.offset} of '{stored.file}', "
            f"needed {int(needed[row])}, where the bytes before it end."
        )
    for file, end in zip(part.files, ends.tolist(), strict=True):
        if end != file.num_bytes:
            raise CheckpointError(
                f"{path}: file '{file.name}': header and boxes have {end} bytes in total, the listed size is {file.num_bytes}."
            )


def _starts(counts: np.ndarray) -> np.ndarray:
    """Where each of several consecutive ranges begins."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])[:-1]


def box_bytes(info: TensorInfo, box: Box) -> int:
    return prod(box.shape) * DTYPES[info.dtype].num_bytes


def header_tensors(boxes: Sequence[tuple[TensorInfo, Box]]) -> Tensors:
    """The entries of a data file's header. The key of a box that is the full tensor is its name, else the name and the box."""
    used = {METADATA}
    for info, box in boxes:
        key = info.name if box == Box.whole(info.shape) else f"{info.name}[{box}]"
        while key in used:
            key += "'"
        used.add(key)
        yield key, info.dtype, box.shape, box_bytes(info, box)
