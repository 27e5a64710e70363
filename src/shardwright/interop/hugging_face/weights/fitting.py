"""The tensors of a folder compared with those that a model needs, before anything is written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint.reading.casting import FLOATS, cast
from shardwright.checkpoint.writing.data_file import CHUNK_BYTES
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.escaped import escaped
from shardwright.core.findings.nearest import nearest
from shardwright.core.findings.patterns import chosen, names_of
from shardwright.core.model.table import ModelTable
from shardwright.interop.hugging_face.weights.files.folder import Folder
from shardwright.interop.hugging_face.weights.files.quantized import FP8, faults
from shardwright.interop.hugging_face.weights.files.safetensors_file import BY_CODE, FoundTensor
from shardwright.interop.hugging_face.weights.mapping import PublishedTensor
from shardwright.models.parts.architecture import Architecture
from shardwright.training.partial import NEW, SKIP, PartialWeights

MOST_LINES = 20
LAYER = re.compile(r"model\.layers\.(\d+)\.")
FREQUENCIES = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PREDICTION_LAYERS = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Tensors of a folder that the model does not have, by name, and why they may be left out."""

    names: tuple[str, ...]
    why: str

    def to_json(self) -> dict[str, object]:
        return {"tensors": list(self.names), "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a folder has beside the tensors of its model: ``left_out``, and the names that are ``kept``."""

    left_out: tuple[LeftOut, ...]
    kept: tuple[str, ...]


def fit(
    folder: Folder,
    needed: Sequence[PublishedTensor],
    table: ModelTable,
    described: str,
    *,
    keeps_prediction: bool = False,
    partial: PartialWeights | None = None,
    unread: Sequence[PublishedTensor] = (),
) -> Fit:
    """What else a folder has that has every needed tensor. ``described``: by what the model is, for the error.

    ``keeps_prediction``: layers for multi-token prediction are kept, and not left out. ``partial``: what a run asks of the folder.
    ``unread``: the tensors of weights that are new in this run.

    Raises InputError that names every tensor that is missing, extra, of another shape, or no floating-point tensor; and
    where layers for multi-token prediction are to be kept and there are none.
    """
    prediction = _prediction_layers(folder, table)
    if keeps_prediction and not prediction.names:
        raise InputError(
            f"{folder.path}: there are no layers for multi-token prediction to keep: {PREDICTION_LAYERS} layers after layer "
            f"{table.num_layers - 1} are needed. Leave out --keep-prediction-layers."
        )
    kept = prediction.names if keeps_prediction else ()
    replaced = tuple(tensor.name for tensor in unread if tensor.name in folder.tensors)
    skipped = _skipped(folder, needed, partial)
    asked = (skipped, LeftOut(names=replaced, why=f"new by {NEW}"), _frequencies(folder, table, skipped.names))
    there = {name for one in asked for name in one.names}
    second = () if HEAD in there else (_second_head(folder, table),)
    left_out = tuple(one for one in (*second, prediction, *asked) if one.names and one.names != kept)
    names = {name for one in left_out for name in one.names}
    lines = mismatches(folder.tensors, needed, names | set(kept))
    lines += [
        f"'{name}': dtype: found {folder.tensors[name].dtype}, which no checkpoint holds"
        for name in kept
        if folder.tensors[name].dtype not in BY_CODE
    ]
    if folder.block is not None:
        lines += faults(folder.tensors, folder.scales, folder.block, {*folder.tensors, *folder.scales} - names)
    if lines:
        more = [f"... and {len(lines) - MOST_LINES:,} more"] if len(lines) > MOST_LINES else []
        raise InputError(
            f"{folder.path}: its tensors are not those of {described}, and nothing was written:\n"
            + "\n".join(f"  {escaped(line)}" for line in [*lines[:MOST_LINES], *more])
            + ("" if partial is None else _permitted(lines, folder, needed))
        )
    return Fit(left_out=left_out, kept=kept)


def mismatches(found: Mapping[str, FoundTensor], needed: Sequence[PublishedTensor], left_out: set[str]) -> list[str]:
    """One line for each tensor that does not match."""
    shapes = {tensor.name: tensor.shape for tensor in needed}
    extra = [name for name in found if name not in shapes and name not in left_out]
    lines: list[str] = []
    for name, shape in shapes.items():
        tensor = found.get(name)
        if tensor is None:
            # Comparing names is slow: not for more lines than are shown.
            near = nearest(name, extra) if len(lines) < MOST_LINES else None
            lines.append(f"'{name}': missing" + (f"; the folder has '{near}'" if near else ""))
        elif tensor.shape != shape:
            lines.append(f"'{name}': shape: found {tensor.shape}, needed {shape}")
        elif tensor.dtype not in BY_CODE or tensor.known.name not in (*FLOATS, FP8):
            lines.append(f"'{name}': dtype: found {tensor.dtype}, needed one of {', '.join(FLOATS)}")
    return lines + [f"'{name}': extra, {found[name].dtype} {found[name].shape}, not in the model" for name in extra]


def _skipped(folder: Folder, needed: Sequence[PublishedTensor], partial: PartialWeights | None) -> LeftOut:
    """The tensors that a run leaves out. Raises InputError for one that it needs."""
    names = frozenset() if partial is None else chosen(folder.tensors, partial.skip, SKIP)
    both = [tensor for tensor in needed if tensor.name in names]
    if both:
        ours = sorted({piece.weight.name for tensor in both for piece in tensor.pieces})
        raise InputError(
            f"{SKIP}: the model has {names_of([tensor.name for tensor in both])} too. Give {NEW} {' '.join(ours)}, so that they "
            f"begin from initial values, or leave {'it' if len(both) == 1 else 'them'} out."
        )
    return LeftOut(names=tuple(name for name in folder.tensors if name in names), why=f"by {SKIP}")


def _permitted(lines: Sequence[str], folder: Folder, needed: Sequence[PublishedTensor]) -> str:
    """What would permit these lines, by the names that the options take."""
    wrong = [
        tensor for tensor in needed if (there := folder.tensors.get(tensor.name)) is None or there.shape != tensor.shape
    ]
    ours = list(dict.fromkeys(piece.weight.name for tensor in wrong for piece in tensor.pieces))
    fixes = [f"{NEW} {' '.join(ours)} begins from initial values"] if ours else []
    fixes += [f"{SKIP} PATTERN leaves tensors out"] if any(": extra" in line for line in lines) else []
    return f"\nOn request: {'; '.join(fixes)}." if fixes else ""


def _second_head(folder: Folder, table: ModelTable) -> LeftOut:
    """A copy of tied embeddings, which some folders hold. Raises InputError where it is not the same."""
    tied = all(weight.hugging_face != HEAD for weight in table.weights)
    head, embedding = folder.tensors.get(HEAD), folder.tensors.get(EMBEDDING)
    if not tied or head is None or embedding is None:
        return LeftOut(names=(), why="")
    if (head.shape, head.dtype) != (embedding.shape, embedding.dtype) or not _same(head, embedding):
        raise InputError(
            f"{folder.path}: the embeddings are tied, and '{HEAD}' is not equal to '{EMBEDDING}'. Nothing was written. "
            f"Set tie_word_embeddings to false in config.json, or leave that tensor out."
        )
    return LeftOut(names=(HEAD,), why=f"equal to '{EMBEDDING}', bit for bit: the embeddings are tied")


def _frequencies(folder: Folder, table: ModelTable, skipped: Sequence[str]) -> LeftOut:
    """Inverse frequencies of positions, which older releases of transformers saved, and which none reads any more.

    Raises InputError for those of another rope.
    """
    assert isinstance(table.architecture, Architecture)
    rope, dim = table.architecture.rope, table.architecture.attention.rotary_dim
    needed = np.array(rope.inverse_frequencies(dim))
    names = tuple(name for name in folder.tensors if FREQUENCIES.fullmatch(name) and name not in skipped)
    for name in names:
        found = folder.tensors[name]
        known = found.dtype in BY_CODE and found.known.name in FLOATS and found.shape == needed.shape
        values = cast(found.read(0, needed.size), found.known.name, "float32").view(np.float32) if known else None
        # As 16 bits round them, or leave them subnormal.
        if values is None or not np.allclose(values, needed, rtol=1e-2, atol=1e-7):
            raise InputError(
                f"{folder.path}: '{escaped(name)}' has other inverse frequencies than rope_theta {rope.theta:,g} with {dim} dims. "
                f"Nothing was written. Correct the rope in config.json, or leave that tensor out."
            )
    return LeftOut(names=names, why="inverse frequencies of positions, which follow from the configuration")


def _same(one: FoundTensor, other: FoundTensor) -> bool:
    if one.dtype not in BY_CODE:
        return False
    width = one.known.num_bytes
    size, step = one.num_bytes // width, CHUNK_BYTES // width
    return all(
        np.array_equal(one.read(start, min(step, size - start)), other.read(start, min(step, size - start)))
        for start in range(0, size, step)
    )


def num_prediction_layers(config: str | None) -> int:
    """How many layers for multi-token prediction a configuration names."""
    given = None if config is None else json.loads(config).get(PREDICTION_LAYERS)
    return given if type(given) is int and given > 0 else 0


def _prediction_layers(folder: Folder, table: ModelTable) -> LeftOut:
    """The layers after the last one that predict further tokens, where the configuration names them."""
    num = 0 if folder.config is None else num_prediction_layers(folder.config.text)
    beyond = range(table.num_layers, table.num_layers + num)
    names = tuple(name for name in folder.tensors if (layer := LAYER.match(name)) and int(layer[1]) in beyond)
    return LeftOut(names=names, why="layers for multi-token prediction, which the model omits")
