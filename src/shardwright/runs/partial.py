"""The weights that a run begins with, where some of them are new, left out or cast; and an average that begins where a run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shardwright.checkpoint import CheckpointError, RunPoint, TensorInfo
from shardwright.checkpoint.format.dtypes import DTYPES, numpy_dtype
from shardwright.checkpoint.format.pieces import PIECE_BYTES
from shardwright.checkpoint.reading.casting import FLOATS, cast
from shardwright.checkpoint.reading.expected import mismatches
from shardwright.checkpoint.reading.stored import Stored
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import chosen, names_of
from shardwright.core.model.optimizer import AVERAGE
from shardwright.core.model.table import Weight
from shardwright.core.plan.plan import Plan
from shardwright.init import box_values
from shardwright.runs.engine import Weights
from shardwright.storage.url import Place
from shardwright.training.optimizer import STATE, kept_tensors
from shardwright.training.options import RunOptions
from shardwright.training.partial import CAST, NEW, SKIP, PartialWeights
from shardwright.training.published import KEPT, METADATA

UNREAD = (*STATE, KEPT)
"""Prefixes of tensors that are no weights, and never read here."""
MOST_LINES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedWeights:
    """Tensors with the names, shapes and dtypes of a plan. ``new``: those that begin from the initial values of ``seed``.

    ``read_as``: the tensor of ``found`` that is read in place of one that it does not have.
    """

    found: Weights
    point: RunPoint
    tensors: Mapping[str, TensorInfo]
    new: Mapping[str, Weight] = field(default_factory=dict, repr=False)
    read_as: Mapping[str, str] = field(default_factory=dict, repr=False)
    seed: int = 0

    @property
    def directory(self) -> Place:
        return self.found.directory

    def expect(self, wanted: Mapping[str, tuple[Sequence[int], str]], *, unread: tuple[str, ...] = ()) -> None:
        """As ``Checkpoint.expect``."""
        del unread
        lines = mismatches(self.tensors, wanted)
        if lines:
            raise CheckpointError(f"{self.directory}: it does not fit this run:", lines=lines, code="SW504")

    def stored(self, name: str) -> Stored:
        """As ``Checkpoint.stored``: one box of what is new. A cast changes the bytes of a piece, and not its elements."""
        width = DTYPES[self.tensors[name].dtype].num_bytes
        if name in self.new:
            shape = np.array([self.tensors[name].shape], np.int64)
            return Stored(np.zeros_like(shape), shape, width, PIECE_BYTES)
        found = self.found.stored(self._source(name))
        return Stored(found.starts, found.stops, width, found.piece_bytes * width // found.width)

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> list[np.ndarray]:
        """As ``Checkpoint.read_boxes``: initial values, or elements in the dtype of the run."""
        dtype = DTYPES[self.tensors[name].dtype]
        results = [np.empty(box.shape, dtype.bits) for box in boxes]
        self.read_into(name, list(zip(boxes, results, strict=True)))
        return [each.view(dtype.raw if raw else numpy_dtype(dtype, name)) for each in results]

    def read_into(self, name: str, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """As ``read_boxes``, into arrays of unsigned integers of the dtype's width."""
        info, boxes = self.tensors[name], [box for box, _ in targets]
        if name in self.new:
            source = "float32"
            arrays: Sequence[Any] = [box_values(self.new[name], self.seed, box) for box in boxes]
        elif (source := self.found.tensors[self._source(name)].dtype) == info.dtype:
            self.found.read_into(self._source(name), targets)
            return
        else:
            arrays = self.found.read_boxes(self._source(name), boxes, raw=True)
        for (_, array), elements in zip(targets, arrays, strict=True):
            array[...] = cast(elements.view(DTYPES[source].bits), source, info.dtype)

    def _source(self, name: str) -> str:
        return self.read_as.get(name, name)


def with_average(found: Weights, plan: Plan) -> Weights:
    """The state of a checkpoint for a run that has an average of the weights, or none, where the checkpoint has not.

    A new average begins with the weights. Of a run that keeps none any more, that of the checkpoint is not read.
    """
    wanted = {one.name: one for one in kept_tensors(plan) if one.name.startswith(AVERAGE.prefix)}
    there = any(name.startswith(AVERAGE.prefix) for name in found.tensors)
    if there == bool(wanted):
        return found
    tensors = {name: info for name, info in found.tensors.items() if not name.startswith(AVERAGE.prefix)}
    begun = {name: one.weight for name, one in wanted.items() if one.weight in tensors}
    new = {name: replace(tensors[weight], name=name, dtype=wanted[name].dtype) for name, weight in begun.items()}
    return FittedWeights(found=found, point=found.point, tensors=tensors | new, read_as=begun)


def partial_of(options: RunOptions, plan: Plan) -> PartialWeights:
    """What a run asks of its weights. Raises InputError for a pattern that matches no weight of the model."""
    names = [row.name for row in plan.weights]
    return PartialWeights(
        new=chosen(names, options.weights_new, NEW), skip=options.weights_skip, cast=options.weights_cast
    )


def fitted_weights(
    found: Weights, plan: Plan, partial: PartialWeights, seed: int
) -> tuple[FittedWeights, tuple[str, ...]]:
    """The weights of a plan, with lines that say what is new, left out and cast. Reads no element.

    Raises InputError that names every tensor that does not fit, and the option that would permit it.
    """
    rows = {row.name: row for row in plan.weights}
    there = {name: info for name, info in found.tensors.items() if not name.startswith(UNREAD)}
    skipped = chosen(there, partial.skip, SKIP)
    needed = skipped & rows.keys() - partial.new
    if needed:
        raise InputError(
            f"{SKIP}: the model has {names_of(sorted(needed))} too. Name the tensor with {NEW}, so that it begins from "
            f"initial values, or leave it out."
        )
    read = {name: info for name, info in there.items() if name not in partial.new and name not in skipped}
    casts = {
        name: info.dtype
        for name, info in read.items()
        if partial.cast
        and name in rows
        and info.dtype != rows[name].dtype
        and {info.dtype, rows[name].dtype} <= {*FLOATS}
    }
    # Of the table, not of the plan: PyTorch's plan has other dims.
    shapes = {one.name: (one.num, *one.shape) if one.stack else one.shape for one in plan.request.table.weights}
    wanted = {name: (shapes[name], casts.get(name, rows[name].dtype)) for name in rows if name not in partial.new}
    lines = mismatches(read, wanted)
    if lines:
        raise InputError(_refusal(found.directory, lines, partial))
    tensors = {
        name: replace(there.get(name, _info(name)), shape=shapes[name], dtype=row.dtype) for name, row in rows.items()
    }
    weights = FittedWeights(
        found=found,
        point=found.point,
        tensors=tensors,
        new={name: plan.request.table.weight(name) for name in rows if name in partial.new},
        seed=seed,
    )
    ignored = [name for name in there if name in skipped or name in partial.new]
    return weights, tuple(_notes(weights, ignored, casts, rows))


def without_configuration(point: RunPoint) -> RunPoint:
    """The point of weights that are not those of their configuration any more: an export must not write it."""
    return replace(point, metadata={name: value for name, value in point.metadata.items() if name != METADATA})


def _info(name: str) -> TensorInfo:
    return TensorInfo(name=name, shape=(), dtype="float32")


def _notes(
    weights: FittedWeights, ignored: Sequence[str], casts: Mapping[str, str], rows: Mapping[str, Any]
) -> Iterator[str]:
    if weights.new:
        yield f"{_counted(weights.new)} from the initial values of seed {weights.seed}: {names_of(list(weights.new))}"
    if ignored:
        yield f"{_counted(ignored)} left out of {weights.directory}: {names_of(ignored)}"
    for source, target in sorted({(dtype, rows[name].dtype) for name, dtype in casts.items()}):
        names = [name for name, dtype in casts.items() if (dtype, rows[name].dtype) == (source, target)]
        yield f"{_counted(names)} cast from {source} to {target}: {names_of(names)}"


def _counted(names: Sequence[str] | Mapping[str, Any]) -> str:
    return f"{len(names):,} {'tensor is' if len(names) == 1 else 'tensors are'}"


def _refusal(where: Place, lines: Sequence[str], partial: PartialWeights) -> str:
    fixes = []
    if any(": missing" in line or "shape: found" in line for line in lines):
        fixes.append(f"{NEW} PATTERN begins tensors from initial values")
    if any(": extra" in line for line in lines):
        fixes.append(f"{SKIP} PATTERN leaves tensors out")
    if not partial.cast and any("dtype: found" in line for line in lines):
        fixes.append(f"{CAST} casts floating dtypes")
    shown = [f"  {line}" for line in lines[:MOST_LINES]]
    shown += [f"  ... and {len(lines) - MOST_LINES:,} more"] if len(lines) > MOST_LINES else []
    end = [f"On request: {'; '.join(fixes)}."] if fixes else []
    return "\n".join([f"--weights {where}: its tensors are not those of this run:", *shown, *end])
