"""From a model folder to a checkpoint at step 0 that holds its weights. One tensor at a time is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo, committed, save_checkpoint
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.model.architecture import architecture_values
from shardwright.core.model.table import Weight
from shardwright.interop.hugging_face.weights.elements import read_piece
from shardwright.interop.hugging_face.weights.files.folder import CONFIG, Folder, open_folder
from shardwright.interop.hugging_face.weights.fitting import LeftOut, fit
from shardwright.interop.hugging_face.weights.mapping import (
    Piece,
    PublishedTensor,
    form_of,
    published_tensors,
    stored_shape,
)
from shardwright.interop.hugging_face.weights.model import KEPT, KnownModel, model_of_folder

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and all bytes."""

LAYOUT_NAME = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsImport:
    """What to import. ``model``: a name here, where the folder has no configuration. ``dtype`` None: as they are published."""

    folder: Path
    out: Path
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint that was made of a folder. ``num_bytes``: of its elements. ``block``: rows and columns of FP8 with one scale."""

    directory: Path
    model: KnownModel
    num_published: int
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    num_dequantized: int
    block: tuple[int, int] | None
    left_out: tuple[LeftOut, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "directory": str(self.directory),
            "model": self.model.name,
            "settings": dict(self.model.settings),
            "num_published": self.num_published,
            "num_tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "dtypes": list(self.dtypes),
            "num_dequantized": self.num_dequantized,
            "left_out": [one.to_json() for one in self.left_out],
            "findings": [finding.to_json() for finding in self.findings],
        }


def unseen(done: int, total: int) -> None:
    """Progress that nobody sees."""
    del done, total


def import_weights(request: WeightsImport, progress: Progress = unseen) -> Imported:
    """Writes the checkpoint. Every tensor's name, shape and dtype is checked before anything is written.

    Raises InputError for a folder that is incomplete or does not fit the model, and for an ``out`` that holds a checkpoint.
    """
    if committed(request.out):
        raise InputError(f"{request.out} already holds a checkpoint. Give another --out.")
    folder = open_folder(request.folder)
    model = model_of_folder(folder, request.model, request.settings)
    experts = form_of(folder.tensors)
    needed = published_tensors(model.table, experts)
    described = f"--model {model.command}" if request.model is not None else f"its {CONFIG}"
    left_out = fit(folder, needed, model.table, described)
    dtypes = {weight.name: _dtype(weight, folder, needed, request.dtype) for weight in model.table.weights}
    infos = [
        TensorInfo(name=weight.name, shape=stored_shape(weight), dtype=dtypes[weight.name])
        for weight in model.table.weights
    ]
    point = RunPoint(
        step=0,
        seed=0,
        data_position=0,
        model=model.name,
        layout_name=LAYOUT_NAME,
        layout_text="",
        mesh={},
        metadata={
            KEPT: {"settings": dict(model.settings), "experts": experts, "config": model.config},
            **architecture_values(model.table),
        },
    )
    total = sum(
        DTYPES[dtypes[piece.weight.name]].num_bytes * piece.size for tensor in needed for piece in tensor.pieces
    )
    boxes = _boxes(folder, needed, dtypes, _counted(progress, total))
    directory = save_checkpoint(request.out, point, infos, boxes)
    return Imported(
        directory=directory,
        model=model,
        num_published=len(needed),
        num_tensors=len(infos),
        num_bytes=total,
        dtypes=tuple(dict.fromkeys(dtypes.values())),
        num_dequantized=sum(tensor.name in folder.scales for tensor in needed),
        block=folder.block,
        left_out=left_out,
        findings=model.findings,
    )


def _dtype(weight: Weight, folder: Folder, needed: tuple[PublishedTensor, ...], asked: str | None) -> str:
    """The dtype in which a weight is stored: as asked; frozen ones in their own; without asking, as they are published."""
    if asked is not None:
        return weight.dtype if weight.frozen else asked
    names = [tensor.name for tensor in needed if any(piece.weight is weight for piece in tensor.pieces)]
    found = {folder.dtype(name): name for name in names}
    if len(found) > 1:
        (first, name), (second, other) = list(found.items())[:2]
        raise InputError(
            f"{folder.path}: '{name}' is {first} and '{other}' is {second}, and both belong to '{weight.name}', which has "
            f"one dtype. Give it with --dtype. Nothing was written."
        )
    return next(iter(found))


def _boxes(
    folder: Folder, needed: tuple[PublishedTensor, ...], dtypes: Mapping[str, str], count: Callable[[int], None]
) -> Iterator[OwnedBox]:
    for tensor in needed:
        for piece in tensor.pieces:
            read = _reader(folder, tensor.name, piece, dtypes[piece.weight.name], count)
            yield OwnedBox(name=piece.weight.name, box=piece.box, array=read)


def _reader(
    folder: Folder, name: str, piece: Piece, dtype: str, count: Callable[[int], None]
) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        array = read_piece(folder, name, piece, Box.whole(piece.inner_shape), dtype)
        count(array.nbytes)
        return array.reshape(piece.box.shape).view(DTYPES[dtype].raw)

    return read


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return count
