"""From a model folder to a checkpoint at step 0 that holds its weights. One tensor at a time is in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path

import numpy as np

from shardwright.checkpoint import OwnedBox, RunPoint, TensorInfo, commit, committed, saving, write_part
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.model.architecture import architecture_values
from shardwright.core.model.table import Weight
from shardwright.interop.hugging_face.weights.beside import files_beside
from shardwright.interop.hugging_face.weights.elements import read_piece, read_tensor
from shardwright.interop.hugging_face.weights.files.folder import CONFIG, Folder, open_folder
from shardwright.interop.hugging_face.weights.files.quantized import FP8, is_quantized, scales_shape
from shardwright.interop.hugging_face.weights.fitting import Fit, LeftOut, fit
from shardwright.interop.hugging_face.weights.fp8 import infos_of
from shardwright.interop.hugging_face.weights.mapping import (
    ExpertsForm,
    Piece,
    PublishedTensor,
    form_of,
    published_tensors,
    stored_shape,
)
from shardwright.interop.hugging_face.weights.model import KnownModel, model_of_folder
from shardwright.storage.url import Place
from shardwright.training.partial import PartialWeights
from shardwright.training.published import FOLDER, KEPT, METADATA, OTHER_FILES, TOKENIZER_FILES, copied

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and all bytes."""

LAYOUT_NAME = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsImport:
    """What to import. ``model``: a name here, where the folder has no configuration. ``dtype`` None: as they are published.

    ``keeps_prediction``: layers for multi-token prediction are kept beside the weights. ``keeps_fp8``: so are the codes and scales of
    weights in FP8.
    """

    folder: Path
    out: Place
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    keeps_prediction: bool = False
    keeps_fp8: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A checkpoint that was made of a folder. ``num_bytes``: of the elements of its weights.

    ``block``: rows and columns of FP8 with one scale. ``kept``: published names of tensors beside the weights; ``kept_fp8``: of how
    many weights the codes and scales are. ``files``: those that were copied.
    """

    directory: Place
    model: KnownModel
    num_published: int
    num_tensors: int
    num_bytes: int
    dtypes: tuple[str, ...]
    num_dequantized: int
    block: tuple[int, int] | None
    left_out: tuple[LeftOut, ...]
    kept: tuple[str, ...]
    kept_fp8: int
    files: tuple[str, ...]
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
            "kept": list(self.kept),
            "kept_fp8": self.kept_fp8,
            "files": list(self.files),
            "findings": [finding.to_json() for finding in self.findings],
        }


def unseen(done: int, total: int) -> None:
    """Progress that nobody sees."""
    del done, total


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedFolder:
    """A folder whose tensors are those of a model. ``experts``: how it holds them. ``files``: those kept beside the weights."""

    folder: Folder
    model: KnownModel
    experts: ExpertsForm
    needed: tuple[PublishedTensor, ...]
    fit: Fit
    files: tuple[str, ...]

    @property
    def point(self) -> RunPoint:
        """Step 0, with what an export needs."""
        model = self.model
        kept = {"settings": dict(model.settings), "experts": self.experts, "config": model.config}
        return RunPoint(
            step=0,
            seed=0,
            data_position=0,
            model=model.name,
            layout_name=LAYOUT_NAME,
            layout_text="",
            mesh={},
            metadata={METADATA: kept, **architecture_values(model.table)},
        )


def fitted(
    path: Path,
    model: Callable[[Folder], KnownModel],
    described: str = f"its {CONFIG}",
    *,
    keeps_prediction: bool = False,
    partial: PartialWeights | None = None,
) -> FittedFolder:
    """A folder, compared with its model by names, shapes and dtypes.

    ``partial``: what a run asks of it. The tensors of its new weights are not among those needed.

    ``described``: by what the model is, for an error; ``{command}`` stands for its name and settings.

    Raises InputError where it is incomplete or does not fit.
    """
    folder = open_folder(path)
    known = model(folder)
    experts = form_of(folder.tensors)
    new = frozenset() if partial is None else partial.new
    published = published_tensors(known.table, experts)
    needed = tuple(tensor for tensor in published if any(piece.weight.name not in new for piece in tensor.pieces))
    return FittedFolder(
        folder=folder,
        model=known,
        experts=experts,
        needed=needed,
        fit=fit(
            folder,
            needed,
            known.table,
            described.format(command=known.command),
            keeps_prediction=keeps_prediction,
            partial=partial,
            unread=[tensor for tensor in published if tensor not in needed] if new else (),
        ),
        files=files_beside(path, known.table.sizes["vocab"]),
    )


def import_weights(request: WeightsImport, progress: Progress = unseen) -> Imported:
    """Writes the checkpoint. Every tensor's name, shape and dtype is checked before anything is written.

    Raises InputError for a folder that is incomplete or does not fit the model, and for an ``out`` that holds a checkpoint.
    """
    if committed(request.out):
        raise InputError(f"{request.out} already holds a checkpoint. Give another --out.")
    found = fitted(
        request.folder,
        lambda folder: model_of_folder(folder, request.model, request.settings),
        *([] if request.model is None else ["--model {command}"]),
        keeps_prediction=request.keeps_prediction,
    )
    folder, table, kept = found.folder, found.model.table, found.fit.kept
    dtypes = {weight.name: _dtype(weight, folder, found.needed, request.dtype) for weight in table.weights}
    in_fp8 = _in_fp8(folder, found.needed) if request.keeps_fp8 else ()
    infos = [
        *(TensorInfo(name=one.name, shape=stored_shape(one), dtype=dtypes[one.name]) for one in table.weights),
        *(TensorInfo(name=KEPT + name, shape=folder.tensors[name].shape, dtype=folder.dtype(name)) for name in kept),
        *(info for tensor in in_fp8 for info in infos_of(tensor.name, tensor.shape, _block(folder))),
    ]
    total = sum(DTYPES[info.dtype].num_bytes * prod(info.shape) for info in infos)
    count = _counted(progress, total)
    boxes = chain(
        _boxes(folder, found.needed, dtypes, count),
        _kept_boxes(folder, kept, count),
        _fp8_boxes(folder, in_fp8, count),
    )
    with saving(request.out, found.point.step) as save:
        write_part(save, infos, boxes)
        # When no other import can write here any more, and before there is a checkpoint without them.
        with copied(folder.path, request.out / FOLDER, found.files, instead_of=(*TOKENIZER_FILES, *OTHER_FILES)):
            directory = commit(save, found.point)
    return Imported(
        directory=directory,
        model=found.model,
        num_published=len(found.needed),
        num_tensors=len(table.weights),
        num_bytes=sum(DTYPES[dtypes[one.name]].num_bytes * prod(stored_shape(one)) for one in table.weights),
        dtypes=tuple(dict.fromkeys(dtypes.values())),
        num_dequantized=sum(name in folder.scales for name in (*(tensor.name for tensor in found.needed), *kept)),
        block=folder.block,
        left_out=found.fit.left_out,
        kept=kept,
        kept_fp8=len(in_fp8),
        files=found.files,
        findings=found.model.findings,
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


def _kept_boxes(folder: Folder, names: tuple[str, ...], count: Callable[[int], None]) -> Iterator[OwnedBox]:
    """The tensors beside the weights, as they are published."""

    def reader(name: str) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            array = read_tensor(folder, name)
            count(array.nbytes)
            return array.view(DTYPES[folder.dtype(name)].raw)

        return read

    for name in names:
        if prod(shape := folder.tensors[name].shape):
            yield OwnedBox(name=KEPT + name, box=Box.whole(shape), array=reader(name))


def _in_fp8(folder: Folder, needed: tuple[PublishedTensor, ...]) -> tuple[PublishedTensor, ...]:
    """The tensors of the model that are published in FP8. Raises InputError for a folder without any."""
    found = tuple(tensor for tensor in needed if is_quantized(folder.tensors[tensor.name]))
    if not found:
        raise InputError(f"{folder.path}: no weight is FP8, whose codes could be kept. Leave out --keep-fp8.")
    return found


def _block(folder: Folder) -> tuple[int, int]:
    assert folder.block is not None, folder.path
    return folder.block


def _fp8_boxes(
    folder: Folder, tensors: tuple[PublishedTensor, ...], count: Callable[[int], None]
) -> Iterator[OwnedBox]:
    """The codes of weights as they are published, and their scales in float32."""

    def reader(name: str, of_scales: bool) -> Callable[[], np.ndarray]:
        def read() -> np.ndarray:
            tensor, scales = folder.tensors[name], folder.scales_of(name)
            assert scales is not None, name
            shape = scales_shape(tensor.shape, scales.block)
            array = (
                scales.values.reshape(shape) if of_scales else tensor.read(0, prod(tensor.shape)).reshape(tensor.shape)
            )
            count(array.nbytes)
            return array.view(DTYPES["float32" if of_scales else FP8].raw)

        return read

    for tensor in tensors:
        for info, of_scales in zip(infos_of(tensor.name, tensor.shape, _block(folder)), (False, True), strict=True):
            if prod(info.shape):
                yield OwnedBox(name=info.name, box=Box.whole(info.shape), array=reader(tensor.name, of_scales))


def _counted(progress: Progress, total: int) -> Callable[[int], None]:
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return count
