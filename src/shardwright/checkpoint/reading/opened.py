"""An open checkpoint: what it holds, and reads of any box, under any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from shardwright.checkpoint.folder.directory import committed, is_step
from shardwright.checkpoint.folder.names import LEFTOVER, no_checkpoint, step_of
from shardwright.checkpoint.format.dtypes import DTYPES, numpy_dtype
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.index import Index, read_index
from shardwright.checkpoint.format.manifest import INDEX_NAME, Manifest, RunPoint, TensorInfo
from shardwright.checkpoint.format.read_manifest import read_manifest
from shardwright.checkpoint.reading.expected import mismatches
from shardwright.checkpoint.reading.files import Parts, read_known, read_within
from shardwright.checkpoint.reading.stored import Stored
from shardwright.checkpoint.reading.streams import empty, read_regions
from shardwright.core.boxes.box import Box
from shardwright.core.findings.nearest import did_you_mean
from shardwright.storage.files import each
from shardwright.storage.url import Place, parsed_place

SHOWN_STEPS = 20
"""So many steps are named where another one was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint, made by ``open_checkpoint``. Elements are read and verified on request."""

    directory: Place
    manifest: Manifest
    index: Index = field(repr=False)
    parts: Parts = field(repr=False)

    @property
    def point(self) -> RunPoint:
        """The state of the run when it was saved: step, seed, data position, layout and mesh."""
        return self.manifest.point

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape, dtype and spec of every tensor, by name."""
        return self.manifest.tensors

    @property
    def data_directory(self) -> Place:
        """Where all files but the manifest are."""
        return self.manifest.data_directory(self.directory)

    @property
    def num_bytes(self) -> int:
        """Of all data files."""
        return sum(part.data_bytes for part in self.manifest.parts)

    def tensor(self, name: str) -> TensorInfo:
        """Shape, dtype and spec of a tensor. Raises CheckpointError (SW504) for an unknown name."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.directory}: no tensor is called '{name}'. {did_you_mean(name, self.manifest.tensors)}",
                code="SW504",
            ) from None

    def boxes(self, name: str) -> tuple[Box, ...]:
        """The boxes in which a tensor is stored, in the order of their starts. Raises CheckpointError (SW504) for an unknown name."""
        self.tensor(name)
        return self.index.tables[name].boxes()

    def stored(self, name: str) -> Stored:
        """The same boxes as arrays. Raises CheckpointError (SW504) for an unknown name."""
        width, table = DTYPES[self.tensor(name).dtype].num_bytes, self.index.tables[name]
        return Stored(table.starts, table.stops, width, self.manifest.piece_bytes)

    def read_box(self, name: str, box: Box | None = None, *, raw: bool = False) -> np.ndarray:
        """The elements of any box of a tensor (the full tensor by default), however it was sharded when it was saved.

        As ``read_boxes`` for one box.
        """
        return self.read_boxes(name, [Box.whole(self.tensor(name).shape) if box is None else box], raw=raw)[0]

    def read_boxes(self, name: str, boxes: Sequence[Box], *, raw: bool = False) -> list[np.ndarray]:
        """The elements of several boxes of a tensor. What several of them need is read once.

        Reads only the pieces that have an element of a box, and verifies each before returning any of its elements.
        The results are new arrays in the tensor's dtype: nothing is ever cast. With ``raw`` the
        elements are opaque (``np.void`` of their width), for callers that move them without interpreting them.

        Raises CheckpointError for an unknown name (SW504) and for what cannot be read (SW503), DamagedError for bytes that are
        not those that were saved (SW503).
        """
        dtype = DTYPES[self.tensor(name).dtype]
        result_dtype = dtype.raw if raw else numpy_dtype(dtype, name)
        results = [empty(box.shape, dtype.bits, f"{self.directory}: tensor '{name}', box [{box}]") for box in boxes]
        self.read_into(name, list(zip(boxes, results, strict=True)))
        return [result.view(result_dtype) for result in results]

    def read_into(self, name: str, targets: Sequence[tuple[Box, np.ndarray]]) -> None:
        """As ``read_boxes``, into arrays of the boxes' shapes: unsigned integers of the dtype's width."""
        info, table = self.tensor(name), self.index.tables[name]
        for box, array in targets:
            assert len(box.start) == len(info.shape), (name, info.shape, box)
            assert Box.whole(info.shape).contains(box), (name, info.shape, box)
            assert array.shape == box.shape, (name, array.shape, box)
        numbers = {number: None for box, _ in targets for number in table.overlapping(box).tolist()}

        def read(number: int) -> None:
            stored = self.parts.box(int(table.part[number]), int(table.row[number]), name, table.box(number))
            read_regions(self.data_directory, stored, self.manifest.piece_bytes, targets)

        for _ in each(self.directory, read, sorted(numbers)):
            pass

    def expect(self, wanted: Mapping[str, tuple[Sequence[int], str]], *, unread: tuple[str, ...] = ()) -> None:
        """Compares the checkpoint with the tensors a program expects: name to (shape, dtype).

        ``unread``: prefixes of names that the checkpoint may have in addition.

        Raises CheckpointError (SW504) that names every tensor that is missing, unexpected, or has another shape or dtype.
        """
        found = {name: info for name, info in self.tensors.items() if name in wanted or not name.startswith(unread)}
        lines = mismatches(found, wanted)
        if lines:
            shown = lines[:20] + ([f"... and {len(lines) - 20} more"] if len(lines) > 20 else [])
            raise CheckpointError(
                f"{self.directory}: the checkpoint does not fit this run, and nothing of it was loaded:",
                lines=[f"  {line}" for line in shown],
                code="SW504",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest intact checkpoint, or None, and why each newer one was skipped."""

    checkpoint: Checkpoint | None
    passed_over: tuple[CheckpointError, ...]


def open_checkpoint(directory: Place | str, *, all_files: bool = True) -> Checkpoint:
    """Opens the directory of one step and verifies everything except the elements.

    The manifest is self-consistent and matches its digest, so does the index, and boxes cover each tensor exactly once. Every
    part file matches its digest and the index, and every data file exists and has the recorded size and header digest.
    Without ``all_files`` a part file is verified when a box of it is read: of thousands of processes one verifies all
    files, and each of the others those that it reads.

    Raises CheckpointError, one message that names file and tensor; DamagedError if the error proves that the checkpoint is
    not what was saved.
    """
    directory = parsed_place(directory)
    manifest = read_manifest(directory)
    step = step_of(directory)
    if LEFTOVER.fullmatch(directory.name):
        raise CheckpointError(
            f"{directory}: the save or the deletion of this checkpoint did not finish. Give another one."
        )
    if step is not None and step != manifest.point.step:
        raise CheckpointError(
            f"{directory}: the manifest is of step {manifest.point.step}, the directory of step {step}."
        )
    infos, stored = tuple(manifest.tensors.values()), manifest.index
    files = manifest.data_directory(directory)
    path = files / INDEX_NAME
    data = read_known(path, stored.num_bytes, stored.digest, "It holds the boxes of all tensors.")
    with read_within(path):
        index = read_index(path, data, infos, len(manifest.parts))
        parts = Parts(files, manifest)
    if all_files:
        parts.check_all(index)
    return Checkpoint(directory=directory, manifest=manifest, index=index, parts=parts)


def open_newest(directory: Place | str) -> Checkpoint:
    """Opens the directory of one step, or the newest step in that of a run. Raises CheckpointError if there is none."""
    directory = parsed_place(directory)
    if is_step(directory):
        return open_checkpoint(directory)
    found = committed(directory)
    if not found:
        raise no_checkpoint(directory)
    return open_checkpoint(found[0])


def open_step(directory: Place | str, step: int) -> Checkpoint:
    """Opens a step of the directory of a run. The directory of one step may be given, if it is this one.

    Raises CheckpointError for a step that is not there, with those that are.
    """
    directory = parsed_place(directory)
    if is_step(directory):
        checkpoint = open_checkpoint(directory)
        if checkpoint.point.step != step:
            raise CheckpointError(
                f"{directory}: it is of step {checkpoint.point.step}, and step {step} was asked for. Give the folder of all steps, or "
                f"leave out the step."
            )
        return checkpoint
    there = {step_of(one): one for one in committed(directory)}
    if not there:
        raise no_checkpoint(directory)
    if step not in there:
        newest = [str(number) for number in there][:SHOWN_STEPS]
        more = f", and {len(there) - SHOWN_STEPS:,} older ones" if len(there) > SHOWN_STEPS else ""
        raise CheckpointError(
            f"{directory}: there is no checkpoint of step {step}. Those there, the newest first: {', '.join(newest)}{more}."
        )
    return open_checkpoint(there[step])


def latest(out: Place | str) -> Latest:
    """The newest intact checkpoint under ``OUT/checkpoints``, and what is wrong with each newer one."""
    passed_over: list[CheckpointError] = []
    for directory in committed(parsed_place(out)):
        try:
            return Latest(checkpoint=open_checkpoint(directory), passed_over=tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(error)
    return Latest(checkpoint=None, passed_over=tuple(passed_over))
