"""An open checkpoint: what it holds, and reads of any box, under any layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from shardwright.checkpoint.directory import LEFTOVER, committed, step_of
from shardwright.checkpoint.expected import mismatches
from shardwright.checkpoint.format.data_file import check_header
from shardwright.checkpoint.format.dtypes import DTYPES, numpy_dtype
from shardwright.checkpoint.format.errors import CheckpointError, DamagedError
from shardwright.checkpoint.format.manifest import (
    FILE_NAME,
    Manifest,
    RunPoint,
    StoredBox,
    StoredFile,
    StoredTensor,
    TensorInfo,
    digest_of,
)
from shardwright.checkpoint.format.read_manifest import NO_MEMORY, read_manifest
from shardwright.checkpoint.format.regular_file import open_regular
from shardwright.checkpoint.reshard import copies_into
from shardwright.checkpoint.verified import CACHE_BYTES, VerifiedBoxes, empty
from shardwright.core.boxes.box import Box
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.layout.wording import count


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One complete checkpoint, made by ``open_checkpoint``. Elements are read and verified on request."""

    directory: Path
    manifest: Manifest
    _boxes: VerifiedBoxes = field(repr=False)

    @property
    def point(self) -> RunPoint:
        """The state of the run when it was saved: step, seed, data position, layout and mesh."""
        return self.manifest.point

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Shape, dtype and spec of every tensor, by name."""
        return {name: tensor.info for name, tensor in self.manifest.tensors.items()}

    def tensor(self, name: str) -> StoredTensor:
        """A tensor and its stored boxes. Raises CheckpointError (SW504) for an unknown name."""
        try:
            return self.manifest.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self.directory}: no tensor is called '{name}'. {did_you_mean(name, self.manifest.tensors)}",
                code="SW504",
            ) from None

    def read_box(self, name: str, box: Box | None = None, *, raw: bool = False) -> np.ndarray:
        """The elements of any box of a tensor (the full tensor by default), however it was sharded when it was saved.

        Reads only the stored boxes that overlap it, and verifies each before returning any of its elements.
        The result is a new array in the tensor's dtype: nothing is ever cast. With ``raw`` the
        elements are opaque (``np.void`` of their width), for callers that move them without interpreting them.

        Raises CheckpointError for an unknown name (SW504) and for what cannot be read (SW503), DamagedError for bytes that are
        not those that were saved (SW503).
        """
        stored = self.tensor(name)
        info, dtype = stored.info, DTYPES[stored.info.dtype]
        box = Box.whole(info.shape) if box is None else box
        assert len(box.start) == len(info.shape), (name, info.shape, box)
        assert Box.whole(info.shape).contains(box), (name, info.shape, box)
        result_dtype = dtype.raw if raw else numpy_dtype(dtype, name)
        result = empty(box.shape, dtype.bits, f"{self.directory}: tensor '{name}', box [{box}]")
        for copy in copies_into(stored.boxes, box):
            source = self._boxes.read(name, copy.source, dtype)
            result[copy.region.within(box).slices] = source[copy.region.within(copy.source.box).slices]
        return result.view(result_dtype)

    def read_stored(self, name: str, stored: StoredBox) -> np.ndarray:
        """The elements of one stored box of a tensor, verified, as unsigned integers of its dtype's width. Read-only."""
        return self._boxes.read(name, stored, DTYPES[self.tensor(name).info.dtype])

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


def open_newest(directory: Path, *, cache_bytes: int = CACHE_BYTES) -> Checkpoint:
    """Opens the directory of one step, or the newest step in that of a run. Raises CheckpointError if there is none."""
    if (directory / FILE_NAME).exists() or step_of(directory) is not None:
        return open_checkpoint(directory, cache_bytes=cache_bytes)
    found = committed(directory)
    if not found:
        raise CheckpointError(
            f"{directory}: there is no checkpoint here. Give the --out of a run, or the directory of one step, "
            f"as in OUT/checkpoints/step-00000010."
        )
    return open_checkpoint(found[0], cache_bytes=cache_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest intact checkpoint, or None, and why each newer one was skipped."""

    checkpoint: Checkpoint | None
    passed_over: tuple[CheckpointError, ...]


def open_checkpoint(directory: Path | str, *, cache_bytes: int = CACHE_BYTES) -> Checkpoint:
    """Opens the directory of one step and verifies everything except the elements.

    The manifest is self-consistent and matches its digest, boxes cover each tensor exactly once, every file exists and has the
    recorded size and header digest, and its header says of each box what the manifest says. Raises CheckpointError, one
    message that names file and tensor; DamagedError if the error proves that the checkpoint is not what was saved.

    ``cache_bytes``: how many bytes of the boxes that were read stay in memory for later reads; 0: only the last box.
    """
    directory = Path(directory)
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
    boxes = manifest.boxes_by_file()
    for file in manifest.files:
        _check_file(directory, file, boxes[file.name])
    return Checkpoint(directory=directory, manifest=manifest, _boxes=VerifiedBoxes(directory, cache_bytes))


def latest(out: Path | str) -> Latest:
    """The newest intact checkpoint under ``OUT/checkpoints``, and what is wrong with each newer one."""
    passed_over: list[CheckpointError] = []
    for directory in committed(Path(out)):
        try:
            return Latest(checkpoint=open_checkpoint(directory), passed_over=tuple(passed_over))
        except CheckpointError as error:
            passed_over.append(error)
    return Latest(checkpoint=None, passed_over=tuple(passed_over))


def _check_file(directory: Path, file: StoredFile, boxes: Sequence[tuple[TensorInfo, StoredBox]]) -> None:
    path, kind = directory / file.name, DamagedError
    try:
        with open_regular(path) as opened:
            header = opened.read(file.header_bytes)
        num_bytes = path.stat().st_size
        if num_bytes == file.num_bytes and digest_of(header) == file.header_digest:
            check_header(path, header, boxes)
            return
        problem = "its header does not match its digest: the file was damaged after it was written"
        if num_bytes != file.num_bytes:
            problem = f"found {num_bytes} bytes, needed {file.num_bytes}"
    except FileNotFoundError:
        problem = "the file is missing"
    except (OSError, MemoryError) as error:
        reason = error.strerror if isinstance(error, OSError) else NO_MEMORY
        problem, kind = f"cannot be read: {reason}", CheckpointError
    raise kind(
        f"{path}: {problem}. It holds {_held(boxes)}. Restore it from a copy, or resume from another checkpoint."
    )


def _held(boxes: Sequence[tuple[TensorInfo, StoredBox]]) -> str:
    """Which tensors have boxes in a file, the first few by name."""
    names = list(dict.fromkeys(info.name for info, _ in boxes))
    shown = ", ".join(f"'{name}'" for name in names[:3])
    return f"boxes of {shown}" + (f" and {count(len(names) - 3, 'more tensor')}" if len(names) > 3 else "")
