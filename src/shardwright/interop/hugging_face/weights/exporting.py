"""From a checkpoint to a model folder that transformers loads. Each stored box is read and verified once."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np

from shardwright.checkpoint import Checkpoint, CheckpointError, StoredBox, open_newest
from shardwright.checkpoint.directory import make_durable
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.model.table import ModelTable
from shardwright.files.replaced import replace_text
from shardwright.interop.hugging_face.weights.config_text import exported_config
from shardwright.interop.hugging_face.weights.files.casting import FLOATS, cast
from shardwright.interop.hugging_face.weights.files.folder import CONFIG
from shardwright.interop.hugging_face.weights.importing import Progress, unseen
from shardwright.interop.hugging_face.weights.mapping import Piece, PublishedTensor, published_tensors, stored_shape
from shardwright.interop.hugging_face.weights.model import KnownModel, experts_form, model_of_checkpoint
from shardwright.interop.hugging_face.weights.shards import shards_of, written
from shardwright.training.optimizer import FIRST, SECOND

MAX_FILE_BYTES = 5_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsExport:
    """What to export. ``directory``: one step's, or that of a run, whose newest step is taken. ``dtype`` None: as stored."""

    directory: Path
    to: Path
    config: Path | None = None
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = None
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A folder that was written. ``moments``: the tensors of the optimizer that the checkpoint has and no folder holds.

    ``config_changes``: how its configuration differs from the one that was given, one phrase each.
    """

    folder: Path
    directory: Path
    model: KnownModel
    num_files: int
    num_tensors: int
    num_bytes: int
    moments: int
    config_changes: tuple[str, ...]

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
            "config_changes": list(self.config_changes),
            "moments_left_out": self.moments,
        }


def export_weights(request: WeightsExport, progress: Progress = unseen) -> Exported:
    """Writes the folder; it gets its name when it is complete.

    Raises InputError for a folder that exists and for a model that the checkpoint does not hold; CheckpointError for a
    checkpoint that cannot be read, DamagedError for damaged bytes. Then nothing is left.
    """
    if request.to.exists() and not (request.to.is_dir() and not any(request.to.iterdir())):
        raise InputError(f"--to {request.to}: it exists already, and is never overwritten. Give another folder.")
    checkpoint = open_newest(request.directory, cache_bytes=0)
    model = model_of_checkpoint(checkpoint, request.config, request.model, request.settings)
    moments = _check_fit(checkpoint, model)
    tensors = published_tensors(model.table, experts_form(checkpoint))
    dtypes = {tensor.name: _dtype(checkpoint, tensor, request.dtype) for tensor in tensors}
    shards = shards_of(tensors, dtypes, request.max_file_bytes)
    config, changes = None, ()
    if model.config is not None:
        trained = [dtypes[tensor.name] for tensor in tensors if not tensor.pieces[0].weight.frozen]
        config, changes = exported_config(model.config, max(trained, key=trained.count))
    with _renamed_at_the_end(request.to) as folder:
        if config is not None:
            replace_text(folder / CONFIG, config)
        with written(folder, shards, tensors, dtypes) as elements:
            _copy(checkpoint, model.table, tensors, dtypes, elements, progress)
    return Exported(
        folder=request.to,
        directory=checkpoint.directory,
        model=model,
        num_files=len(shards),
        num_tensors=len(tensors),
        num_bytes=sum(shard.num_bytes for shard in shards),
        moments=moments,
        config_changes=changes,
    )


def _check_fit(checkpoint: Checkpoint, model: KnownModel) -> int:
    """The number of moments beside the weights. Raises CheckpointError unless the weights are those of the model."""
    table, moments = model.table, 0
    wanted: dict[str, tuple[Sequence[int], str]] = {}
    for weight in table.weights:
        found = checkpoint.tensors.get(weight.name)
        wanted[weight.name] = (stored_shape(weight), "float32" if found is None else found.dtype)
    for name in checkpoint.tensors:
        if any(name.removeprefix(prefix) in wanted and name.startswith(prefix) for prefix in (FIRST, SECOND)):
            wanted[name] = (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype)
            moments += 1
    try:
        checkpoint.expect(wanted)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}\nThe model was taken as {model.command}. Give another with --config, or with --model and --set.",
            code=error.code,
        ) from None
    other = next((name for name, (_, dtype) in wanted.items() if dtype not in FLOATS), None)
    if other is not None:
        raise CheckpointError(
            f"{checkpoint.directory}: '{other}' is {wanted[other][1]}, and one of {', '.join(FLOATS)} is needed.",
            code="SW504",
        )
    return moments


def _dtype(checkpoint: Checkpoint, tensor: PublishedTensor, asked: str | None) -> str:
    """The dtype of a published tensor: as asked, except of frozen weights; without asking, as it is stored."""
    found = {piece.weight.name: checkpoint.tensor(piece.weight.name).info.dtype for piece in tensor.pieces}
    if asked is not None and not tensor.pieces[0].weight.frozen:
        return asked
    if len(set(found.values())) > 1:
        several = ", ".join(f"'{name}' is {dtype}" for name, dtype in found.items())
        raise CheckpointError(
            f"{checkpoint.directory}: '{tensor.name}' is made of weights of several dtypes: {several}. "
            f"Give one with --dtype.",
            code="SW504",
        )
    return next(iter(found.values()))


def _copy(
    checkpoint: Checkpoint,
    table: ModelTable,
    tensors: Sequence[PublishedTensor],
    dtypes: Mapping[str, str],
    elements: Callable[[str], np.ndarray],
    progress: Progress,
) -> None:
    """Reads every stored box of the weights once, and writes its elements where they are published."""
    places = {(piece.weight.name, piece.index): (tensor.name, piece) for tensor in tensors for piece in tensor.pieces}
    boxes = [(weight.name, stored) for weight in table.weights for stored in checkpoint.tensor(weight.name).boxes]
    total, done = sum(stored.num_bytes for _, stored in boxes), 0
    depths = {piece.weight.name: len(piece.index) for tensor in tensors for piece in tensor.pieces}
    for name, stored in boxes:
        data = checkpoint.read_stored(name, stored)
        for index, inner in _indices(stored, depths[name]):
            published, piece = places[name, index]
            source = data[tuple(place - start for place, start in zip(index, stored.box.start, strict=False))]
            target = _target(elements(published), piece)
            target[inner.slices] = cast(source, checkpoint.tensors[name].dtype, dtypes[published])
        done += stored.num_bytes
        progress(done, total)


def _indices(stored: StoredBox, depth: int) -> Iterator[tuple[tuple[int, ...], Box]]:
    """The leading indices of the pieces that a box has elements of, and its bounds within each of them."""
    start, stop = stored.box.start, stored.box.stop
    inner = Box(start[depth:], stop[depth:])
    for index in product(*(range(a, b) for a, b in zip(start[:depth], stop[:depth], strict=True))):
        yield index, inner


def _target(elements: np.ndarray, piece: Piece) -> np.ndarray:
    view = piece.in_our_dims(elements[piece.start : piece.start + piece.size])
    return view[(0,) * len(piece.index)] if piece.index else view


@contextmanager
def _renamed_at_the_end(to: Path) -> Iterator[Path]:
    """A folder next to ``to``, which gets its name if the block ends without an error, and else is deleted."""
    whole = Path(os.path.abspath(to))
    temporary = whole.with_name(f"{whole.name}.writing-{secrets.token_hex(4)}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        make_durable(temporary)
        os.rename(temporary, whole)
        make_durable(whole.parent)
    except OSError as error:
        raise InputError(
            f"--to {to}: the folder could not be written: {error.strerror or error}. Nothing of it was kept. Free some space, "
            f"or give a writable folder."
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
