"""A model folder as the weights that a run begins with: boxes are read from its files, and no checkpoint is made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from shardwright.checkpoint import CheckpointError, RunPoint, TensorInfo
from shardwright.checkpoint.format.dtypes import DTYPES, numpy_dtype
from shardwright.checkpoint.format.pieces import PIECE_BYTES
from shardwright.checkpoint.reading.expected import mismatches
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box
from shardwright.core.plan.plan import Plan
from shardwright.interop.hugging_face.weights.elements import CHUNK_ELEMENTS, read_parts
from shardwright.interop.hugging_face.weights.files.folder import CONFIG, INDEX, SINGLE
from shardwright.interop.hugging_face.weights.importing import FittedFolder, fitted
from shardwright.interop.hugging_face.weights.mapping import Piece, stored_shape
from shardwright.interop.hugging_face.weights.model import model_of_table
from shardwright.models.hugging_face import published_dims
from shardwright.storage.url import Place, local_path
from shardwright.training.partial import ALL_WEIGHTS, PartialWeights
from shardwright.training.published import CHECKPOINTS

MANIFEST = "manifest.json"
"""Of a step's directory: it is a checkpoint, whatever else is in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWeights:
    """The weights of a folder, in boxes of our tensors and in the dtypes of ``tensors``. It has what a run asks of a checkpoint."""

    directory: Path
    point: RunPoint
    tensors: Mapping[str, TensorInfo]
    found: FittedFolder = field(repr=False)
    pieces: Mapping[str, Mapping[tuple[int, ...], tuple[str, Piece]]] = field(repr=False)

    def expect(self, wanted: Mapping[str, tuple[Sequence[int], str]], *, unread: tuple[str, ...] = ()) -> None:
        """Raises CheckpointError (SW504) where these are not the tensors that are wanted."""
        del unread
        lines = mismatches(self.tensors, wanted)
        if lines:
            raise CheckpointError(f"{self.directory}: it does not fit this run:", lines=lines, code="SW504")

    def stored(self, name: str) -> Stored:
        """The boxes of which one is read at a time: of each piece, as many rows of the published tensor as are read at one time."""
        pieces, width = self.pieces[name], DTYPES[self.tensors[name].dtype].num_bytes
        one = next(iter(pieces.values()))[1]
        axes, dims = published_dims(one.weight)
        dim = len(one.index) + axes.index(dims[0][0])
        size = one.box.shape[dim]
        step = max(1, CHUNK_ELEMENTS * size // one.size)
        corners = [
            (
                (*box.start[:dim], first, *box.start[dim + 1 :]),
                (*box.stop[:dim], min(first + step, size), *box.stop[dim + 1 :]),
            )
            for _, piece in pieces.values()
            for box in [piece.box]
            for first in range(0, size, step)
        ]
        starts, stops = (np.array(corner, np.int64) for corner in zip(*corners, strict=True))
        return Stored(starts, stops, width, PIECE_BYTES)

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> list[np.ndarray]:
        """The elements of several boxes, cast or dequantised; with ``raw`` as opaque elements. What several need is read once.

        Raises InputError where a file cannot be read.
        """
        dtype = DTYPES[self.tensors[name].dtype]
        results = [np.empty(box.shape, dtype.bits) for box in boxes]
        self.read_into(name, list(zip(boxes, results, strict=True)))
        return [result.view(dtype.raw if raw else numpy_dtype(dtype, name)) for result in results]

    def read_into(self, name: str, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """As ``read_boxes``, into arrays of unsigned integers of the dtype's width."""
        pieces = self.pieces[name]
        depth = len(next(iter(pieces)))
        needed: dict[tuple[int, ...], list[tuple[Box, np.ndarray]]] = {}
        for box, array in targets:
            inner = Box(box.start[depth:], box.stop[depth:])
            for index in product(*map(range, box.start[:depth], box.stop[:depth])):
                place = tuple(one - start for one, start in zip(index, box.start, strict=False))
                needed.setdefault(index, []).append((inner, array[(*place, ...)]))
        for index, parts in sorted(needed.items(), key=lambda one: one[0]):
            published, piece = pieces[index]
            read_parts(self.found.folder, published, piece, parts, self.tensors[name].dtype)


def open_model_folder(
    path: Place, plan: Plan, partial: PartialWeights = ALL_WEIGHTS
) -> tuple[FolderWeights, tuple[str, ...]] | None:
    """The weights of a model folder in the dtypes of a plan, with lines that say what is cast and left out.

    ``partial``: which weights are new, and are not among those of the folder, and which tensors of it are left out.

    None for what is no model folder, as the folder of a run. Raises InputError for one that is incomplete or does not fit.
    """
    # A model folder is read by memory maps, so it is on this machine.
    folder = local_path(path)
    if (
        folder is None
        or (folder / MANIFEST).exists()
        or (folder / CHECKPOINTS).is_dir()
        or not any((folder / name).is_file() for name in (CONFIG, SINGLE, INDEX))
    ):
        return None
    table = plan.request.table
    found = fitted(folder, lambda folder: model_of_table(folder, table, partial), table.name, partial=partial)
    dtypes = {row.name: row.dtype for row in plan.weights}
    pieces: dict[str, dict[tuple[int, ...], tuple[str, Piece]]] = {}
    for tensor in found.needed:
        for piece in tensor.pieces:
            pieces.setdefault(piece.weight.name, {})[piece.index] = tensor.name, piece
    tensors = {
        weight.name: TensorInfo(name=weight.name, shape=stored_shape(weight), dtype=dtypes[weight.name])
        for weight in table.weights
        if weight.name not in partial.new
    }
    weights = FolderWeights(
        directory=folder,
        point=found.point,
        tensors=tensors,
        found=found,
        pieces=pieces,
    )
    return weights, tuple(_notes(found, dtypes))


def _notes(found: FittedFolder, dtypes: Mapping[str, str]) -> Iterator[str]:
    """What is not as it is in the folder, one line each."""
    folder = found.folder
    casts = {
        (folder.dtype(tensor.name), dtypes[piece.weight.name]) for tensor in found.needed for piece in tensor.pieces
    }
    for source, target in sorted(casts):
        if source != target:
            yield f"weights are cast from {source} to {target}"
    num = sum(tensor.name in folder.scales for tensor in found.needed)
    if num:
        yield f"{num:,} tensors of FP8 are dequantised by their scales"
    for one in found.fit.left_out:
        yield f"left out: {len(one.names):,} tensors as '{one.names[0]}': {one.why}"
    for finding in found.model.findings:
        yield f"{finding.where}: {finding.found}"
