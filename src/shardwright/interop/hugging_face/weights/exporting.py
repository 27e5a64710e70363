"""From a checkpoint to a model folder that transformers loads. What is read is verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from shardwright.checkpoint import Checkpoint, CheckpointError, open_newest
from shardwright.checkpoint.folder.new_folder import new_folder, require_new
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.reading.casting import FLOATS, cast
from shardwright.checkpoint.reading.small import Boxes
from shardwright.core.findings.errors import InputError
from shardwright.core.model.architecture import differences_of_weights
from shardwright.core.model.optimizer import AVERAGE, FIRST, MASTER, SECOND
from shardwright.files.replaced import replace_text
from shardwright.interop.hugging_face.weights.config_text import exported_config
from shardwright.interop.hugging_face.weights.files.folder import CONFIG
from shardwright.interop.hugging_face.weights.files.quantized import SUFFIX
from shardwright.interop.hugging_face.weights.fitting import num_prediction_layers
from shardwright.interop.hugging_face.weights.fp8 import Fp8, fp8_of, kept_of, written_as_fp8
from shardwright.interop.hugging_face.weights.importing import Progress, unseen
from shardwright.interop.hugging_face.weights.mapping import PublishedTensor, published_tensors, stored_shape
from shardwright.interop.hugging_face.weights.model import KnownModel, experts_form, model_of_checkpoint
from shardwright.interop.hugging_face.weights.shards import shards_of, written
from shardwright.storage.url import Place
from shardwright.training.optimizer import owner_of
from shardwright.training.optimizers import OPTIMIZER
from shardwright.training.published import KEPT, OTHER_FILES, TOKENIZER_FILES, copied, found, published_folder

MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsExport:
    """What to export. ``directory``: one step's, or that of a run, whose newest step is taken. ``dtype`` None: as stored.

    ``fp8``: matrices are written in FP8, with scales. ``average``: export the average of the weights in their place. ``prediction_layers``: another checkpoint, whose layers for multi-token prediction are written beside the weights.
    """

    directory: Place
    to: Path
    config: Path | None = None
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    fp8: bool = False
    average: bool = False
    prediction_layers: Place | None = None
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A folder that was written. ``moments``: the tensors of the optimizer that the checkpoint has and no folder holds;
    ``averages``: those of the average of the weights, where it is left out too. ``average``: whether it was exported.

    ``config_changes``: how its configuration differs from the one that was given, one phrase each. ``kept``: the names of
    tensors that are no weights of the model, and were kept beside them; ``missing_prediction``: how many layers for multi-token
    prediction the configuration has, and the folder has not. ``files``: those that were copied. ``fp8_block``: rows and columns of
    FP8 with one scale; ``fp8_kept``, ``fp8_quantized``: how many tensors have the codes of an import, and new ones.
    """

    folder: Path
    directory: Place
    model: KnownModel
    num_files: int
    num_tensors: int
    num_bytes: int
    moments: int
    averages: int
    average: bool
    config_changes: tuple[str, ...]
    kept: tuple[str, ...]
    missing_prediction: int
    files: tuple[str, ...]
    fp8_block: tuple[int, int] | None
    fp8_kept: int
    fp8_quantized: int

    def to_json(self) -> dict[str, object]:
        return {
            "folder": str(self.folder),
            "directory": str(self.directory),
            "model": self.model.name,
            "settings": dict(self.model.settings),
            "num_files": self.num_files,
            "num_tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "config": self.model.config is not None,
            "config_written": self.model.config_is_written,
            "config_changes": list(self.config_changes),
            "moments_left_out": self.moments,
            "averages_left_out": self.averages,
            "average": self.average,
            "kept": list(self.kept),
            "prediction_layers_left_out": self.missing_prediction,
            "files": list(self.files),
            "fp8_block": None if self.fp8_block is None else list(self.fp8_block),
            "fp8_kept": self.fp8_kept,
            "fp8_quantized": self.fp8_quantized,
        }


def export_weights(request: WeightsExport, progress: Progress = unseen) -> Exported:
    """Writes the folder; it gets its name when it is complete.

    Raises InputError for a folder that exists and for a model that the checkpoint does not hold; CheckpointError for a
    checkpoint that cannot be read, DamagedError for damaged bytes. Then nothing is left.
    """
    require_new(request.to)
    checkpoint = open_newest(request.directory)
    model = model_of_checkpoint(checkpoint, request.config, request.model, request.settings)
    moments, averages = _check_fit(checkpoint, model)
    sources = _sources(checkpoint, model, average=request.average)
    beside = _beside(checkpoint, request.prediction_layers)
    tensors = published_tensors(model.table, experts_form(checkpoint))
    of_weights = {name for tensor in tensors for name in (tensor.name, tensor.name + SUFFIX)}
    kept = {name.removeprefix(KEPT): info for name, info in beside.tensors.items() if name.startswith(KEPT)}
    kept = {name: info for name, info in kept.items() if name not in of_weights}
    fp8 = fp8_of(model.table, tensors, model.published) if request.fp8 else None
    dtypes = {tensor.name: _dtype(checkpoint, tensor, sources, request.dtype) for tensor in tensors}
    config, changes = None, ()
    if model.config is not None:
        trained = [dtypes[tensor.name] for tensor in tensors if not tensor.pieces[0].weight.frozen]
        config, changes = exported_config(model.config, max(trained, key=trained.count), fp8 and fp8.block)
        changes = () if model.config_is_written else changes
    dtypes |= {name: info.dtype for name, info in kept.items()}
    dtypes.update(fp8.dtypes() if fp8 else {})
    scales = fp8.scales(tensors) if fp8 else ()
    every = (
        *tensors,
        *scales,
        *(PublishedTensor(name=name, shape=info.shape, pieces=()) for name, info in kept.items()),
    )
    shards = shards_of(every, dtypes, request.max_file_bytes)
    source = published_folder(request.directory)
    files = found(source, (*TOKENIZER_FILES, *OTHER_FILES))
    with new_folder(request.to) as folder:
        if config is not None:
            replace_text(folder / CONFIG, config)
        with copied(source, folder, files), written(folder, shards, every, dtypes) as elements:
            num_kept = _copy(checkpoint, beside, every, sources, dtypes, fp8, elements, progress)
    return Exported(
        folder=request.to,
        directory=checkpoint.directory,
        model=model,
        num_files=len(shards),
        num_tensors=len(every) - len(scales),
        num_bytes=sum(shard.num_bytes for shard in shards),
        moments=moments,
        averages=0 if request.average else averages,
        average=request.average,
        config_changes=changes,
        kept=tuple(kept),
        missing_prediction=0 if kept else num_prediction_layers(model.config),
        files=files,
        fp8_block=fp8 and fp8.block,
        fp8_kept=num_kept,
        fp8_quantized=len(scales) - num_kept,
    )


def _beside(checkpoint: Checkpoint, other: Place | None) -> Checkpoint:
    """The checkpoint with the tensors that are kept beside the weights. Raises InputError for another one that has none."""
    if other is None:
        return checkpoint
    beside = open_newest(other)
    if not any(name.startswith(KEPT) for name in beside.tensors):
        raise InputError(
            f"--prediction-layers {other}: no layers for multi-token prediction are kept there. Import them with "
            f"--keep-prediction-layers."
        )
    changed = differences_of_weights(beside.point.metadata, checkpoint.point.metadata)
    if changed:
        raise InputError(
            f"--prediction-layers {other}: these are layers of another model than {checkpoint.directory}:\n"
            + "\n".join(changed)
        )
    return beside


def _sources(checkpoint: Checkpoint, model: KnownModel, *, average: bool) -> Mapping[str, str]:
    """The tensor of the checkpoint that is exported as each weight. A weight that is not trained has no average.

    Raises InputError where an average is wanted that the checkpoint does not have.
    """
    if not average:
        return {weight.name: weight.name for weight in model.table.weights}
    sources = {w.name: w.name if w.frozen else AVERAGE.prefix + w.name for w in model.table.weights}
    if not any(name.startswith(AVERAGE.prefix) for name in checkpoint.tensors):
        raise InputError(
            f"--average: {checkpoint.directory} has no average of the weights. Leave --average out, or train with "
            f"--average 0.999."
        )
    missing = [source for source in sources.values() if source not in checkpoint.tensors]
    if missing:
        raise CheckpointError(f"{checkpoint.directory}: '{missing[0]}' is missing.", code="SW504")
    return sources


def _check_fit(checkpoint: Checkpoint, model: KnownModel) -> tuple[int, int]:
    """The numbers of tensors of the optimizer and of the average beside the weights.

    Raises CheckpointError unless the weights, and their averages, are those of the model.
    """
    table, moments, averages = model.table, 0, 0
    wanted: dict[str, tuple[Sequence[int], str]] = {}
    for weight in table.weights:
        stored = checkpoint.tensors.get(weight.name)
        wanted[weight.name] = (stored_shape(weight), "float32" if stored is None else stored.dtype)
    for name in checkpoint.tensors:
        if name.startswith(KEPT):
            wanted[name] = (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
        elif name.startswith(AVERAGE.prefix) and owner_of(name) in wanted:
            wanted[name] = (wanted[owner_of(name)][0], checkpoint.tensors[name].dtype)
            averages += 1
        elif name.startswith(OPTIMIZER) or (
            name.startswith((MASTER.prefix, FIRST, SECOND)) and owner_of(name) in wanted
        ):
            wanted[name] = (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
            moments += 1
    try:
        checkpoint.expect(wanted)
    except CheckpointError as error:
        message, *lines = error.message.split("\n")
        advice = f"The model was taken as {model.command}. Give another with --config, or with --model and --set."
        raise CheckpointError(message, lines=[*lines, advice], code=error.code) from None
    floats = {name: dtype for name, (_, dtype) in wanted.items() if not name.startswith((KEPT, OPTIMIZER))}
    other = next((name for name, dtype in floats.items() if dtype not in FLOATS), None)
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.directory}: '{other}' is {floats[other]}, and one of {', '.join(FLOATS)} is needed.",
            code="SW504",
        )
    return moments, averages


def _dtype(checkpoint: Checkpoint, tensor: PublishedTensor, sources: Mapping[str, str], asked: str | None) -> str:
    """The dtype of a published tensor: as asked, except of frozen weights; without asking, as it is stored."""
    stored = {piece.weight.name: checkpoint.tensors[sources[piece.weight.name]].dtype for piece in tensor.pieces}
    if asked is not None and not tensor.pieces[0].weight.frozen:
        return asked
    if len(set(stored.values())) > 1:
        several = ", ".join(f"'{name}' is {dtype}" for name, dtype in stored.items())
        raise CheckpointError(
            f"{checkpoint.directory}: '{tensor.name}' is made of weights of several dtypes: {several}. "
            f"Give one with --dtype.",
            code="SW504",
        )
    return next(iter(stored.values()))


def _copy(
    checkpoint: Checkpoint,
    beside: Checkpoint,
    tensors: Sequence[PublishedTensor],
    sources: Mapping[str, str],
    dtypes: Mapping[str, str],
    fp8: Fp8 | None,
    elements: Callable[[str], np.ndarray],
    progress: Progress,
) -> int:
    """Reads the pieces of every published tensor, and writes their elements where they are published. Returns of how many tensors
    the codes of an import are written."""
    total = sum(prod(tensor.shape) * DTYPES[dtypes[tensor.name]].num_bytes for tensor in tensors)
    boxes, done, num_kept = Boxes(checkpoint), 0, 0
    of_scales = {name + SUFFIX for name in fp8.names} if fp8 else set[str]()
    for tensor in tensors:
        if tensor.name in of_scales:
            continue
        if fp8 is not None and tensor.name in fp8.names:
            codes, scales, is_kept = _in_fp8(checkpoint, boxes, beside, tensor, sources, fp8)
            elements(tensor.name)[...] = codes.reshape(-1)
            elements(tensor.name + SUFFIX)[...] = scales.view(np.uint32).reshape(-1)
            num_kept += is_kept
            done += codes.nbytes + scales.nbytes
            progress(done, total)
            continue
        for piece in tensor.pieces:
            name = sources[piece.weight.name]
            source = checkpoint.tensors[name].dtype
            data = boxes.read(name, piece.box).view(DTYPES[source].bits)
            target = piece.in_our_dims(elements(tensor.name)[piece.start : piece.start + piece.size])
            target[...] = cast(data, source, dtypes[tensor.name])
            done += target.nbytes
            progress(done, total)
        if not tensor.pieces:
            data = beside.read_box(KEPT + tensor.name, raw=True).view(DTYPES[dtypes[tensor.name]].bits)
            elements(tensor.name)[...] = data.reshape(-1)
            done += data.nbytes
            progress(done, total)
    return num_kept


def _in_fp8(
    checkpoint: Checkpoint,
    boxes: Boxes,
    beside: Checkpoint,
    tensor: PublishedTensor,
    sources: Mapping[str, str],
    fp8: Fp8,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """The codes and scales of a tensor, and whether they are those of an import."""
    bits = np.empty(tensor.size, np.uint32)
    stored = ""
    for piece in tensor.pieces:
        name = sources[piece.weight.name]
        stored = checkpoint.tensors[name].dtype
        data = boxes.read(name, piece.box).view(DTYPES[stored].bits)
        piece.in_our_dims(bits[piece.start : piece.start + piece.size])[...] = cast(data, stored, "float32")
    values = bits.view(np.float32).reshape(tensor.shape)
    kept = kept_of(beside, tensor.name, values, stored, fp8.block)
    return (*kept, True) if kept is not None else (*written_as_fp8(values, fp8.block), False)
