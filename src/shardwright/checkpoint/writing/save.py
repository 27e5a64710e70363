"""A save: every process writes its boxes, one process commits. The commit is atomic: the checkpoint exists, or it does not.

One process: ``save_checkpoint``. Several processes, with a barrier of the engine at each line:

    process 0                              the others
    with saving(out, step) as save:
        ---------------------------------- barrier, at which process 0 gives save.name to the others
        write_part(save, ..., process=0)   write_part(join_save(out, step, name), ..., process=i)
        ---------------------------------- barrier
        commit(save, ..., num_processes=n)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import Lock

import numpy as np

from shardwright.checkpoint.folder.directory import steps_at
from shardwright.checkpoint.folder.names import step_directory
from shardwright.checkpoint.format.dtypes import DTYPES
from shardwright.checkpoint.format.errors import CheckpointError
from shardwright.checkpoint.format.manifest import RunPoint, TensorInfo
from shardwright.checkpoint.format.part import (
    MAX_BOX_BYTES,
    StoredBox,
    StoredFile,
    box_bytes,
    data_name,
    declared_name,
    part_bytes,
    part_name,
)
from shardwright.checkpoint.format.pieces import PIECE_BYTES
from shardwright.checkpoint.retention.rules import Keep, rules_of
from shardwright.checkpoint.writing.data_file import (
    MAX_FILE_BYTES,
    JoinedBox,
    OwnedBox,
    grouped,
    joined,
    write_data_file,
)
from shardwright.checkpoint.writing.merging import declared_bytes, merged
from shardwright.checkpoint.writing.retention import delete_old
from shardwright.core.boxes.box import Box
from shardwright.core.findings.nearest import did_you_mean
from shardwright.storage.files import each, system_of, write_durable, write_small
from shardwright.storage.url import Place, parsed_place

LEAST_UPLOAD_BYTES = 64 << 20
"""Less than this is not divided into several uploads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A save in progress. Its files go to ``directory``, which is renamed to ``step_directory(out, step)`` at the end.

    In an object store they stay there, and the manifest that is written at the end names it.
    """

    out: Place
    step: int
    directory: Place

    @property
    def name(self) -> str:
        """By which the other processes of this save join it. No other save has this name."""
        return self.directory.name


def save_checkpoint(
    out: Place | str,
    point: RunPoint,
    tensors: Sequence[TensorInfo],
    boxes: Iterable[OwnedBox],
    *,
    keep: Keep = None,
    run: str | None = None,
) -> Place:
    """Writes the checkpoint of one step from one process, and returns its directory.

    ``boxes`` are the boxes of all tensors, each once: only the first of several replicas. With ``keep``, the number of the
    newest or rules, older checkpoints that no rule keeps are deleted afterwards. ``run``: as of ``saving``.

    Raises CheckpointError and leaves nothing half-written: another save is running here, the step was saved
    before, boxes do not cover a tensor exactly once, the disk is full or not writable.
    """
    rules = rules_of(keep, point.metrics)
    with saving(out, point.step, run=run) as save:
        write_part(save, tensors, boxes)
        return commit(save, point, keep=rules)


@contextmanager
def saving(out: Place | str, step: int, *, run: str | None = None) -> Iterator[Save]:
    """A new save. One process holds the lock while all processes write. Leftovers of killed saves are deleted first.

    If the block ends without ``commit``, by an error or not, what was written is deleted. An object store has no lock: there
    each save writes objects of its own, and of two that save one step the one that commits second is refused. ``run``: eight
    hex digits under which no other run saves there, so that what is left of its saves is known to be dead.
    """
    out = parsed_place(out)
    final = step_directory(out, step)
    with _explained(final), steps_at(final).saving(final, run) as directory:
        yield Save(out=out, step=step, directory=directory)


def join_save(out: Place | str, step: int, name: str) -> Save:
    """The save that process 0 has begun for a step, for use by the other processes. ``name``: its ``Save.name``.

    With the name, a late process of a run that has ended cannot write into the save of another run of the same step.
    """
    out = parsed_place(out)
    final = step_directory(out, step)
    directory = steps_at(final).joined(final, name)
    if directory is None:
        raise CheckpointError(
            f"{final}: no save of this step is in progress under the name '{name}'. "
            f"Every process must be given the same --out, on a file system that all of them share."
        )
    return Save(out=out, step=step, directory=directory)


def write_part(
    save: Save,
    tensors: Sequence[TensorInfo],
    boxes: Iterable[OwnedBox],
    *,
    process: int = 0,
    max_file_bytes: int = MAX_FILE_BYTES,
    piece_bytes: int = PIECE_BYTES,
) -> None:
    """Writes the boxes that one process owns, durably, and then the list of them. The list marks this process as done.

    Every process passes the same ``tensors`` and the same ``piece_bytes``: the bytes that have a digest of their own. Boxes of
    size 0 are omitted. Raises CheckpointError.
    """
    known = {info.name: info for info in tensors}
    if len(known) != len(tensors):
        names = [info.name for info in tensors]
        duplicate = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"two tensors are called '{duplicate}'. Give each a name of its own.", code="SW504")
    for info in tensors:
        require_name(info.name)
        if info.dtype not in DTYPES:
            raise CheckpointError(
                f"tensor '{info.name}': a checkpoint does not hold dtype '{info.dtype}'. Those it holds: {', '.join(DTYPES)}.",
                code="SW504",
            )
    owned = [(_info_of(box, known), box) for box in boxes]
    with _explained(step_directory(save.out, save.step)):
        write_small(save.directory / declared_name(process), declared_bytes(tensors))
        numbers = {info.name: number for number, info in enumerate(tensors)}
        # In a store several files are written at a time. What reads a box need not know of threads.
        reading = Lock()
        own = [(info, _one_at_a_time(one, reading)) for info, one in owned if one.box.size]
        most = _most_file_bytes(save, sum(box_bytes(info, one.box) for info, one in own), max_file_bytes)

        def write(numbered: tuple[int, Sequence[JoinedBox]]) -> tuple[StoredFile, list[StoredBox]]:
            number, group = numbered
            return write_data_file(save.directory / data_name(process, number), group, save.step, piece_bytes)

        written = list(each(save.directory, write, enumerate(grouped(joined(own, most), most))))
        rows = [(numbers[box.info.name], number, box) for number, (_, stored) in enumerate(written) for box in stored]
        write_durable(save.directory / part_name(process), part_bytes([file for file, _ in written], rows, piece_bytes))


def require_name(name: str) -> None:
    """Raises CheckpointError for a name that no file can have as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise CheckpointError(
            f"tensor {name!a}: its name has half of a surrogate pair, which is no character. Give it another name.",
            code="SW504",
        ) from None


def _one_at_a_time(owned: OwnedBox, reading: Lock) -> OwnedBox:
    array = owned.array
    if not callable(array):
        return owned

    def read() -> np.ndarray:
        with reading:
            return np.asarray(array())

    return replace(owned, array=read)


def _most_file_bytes(save: Save, num_bytes: int, most: int) -> int:
    """The bytes of a data file: in a store as many files as it gets at a time, since each is one upload."""
    parallel = system_of(save.directory).parallel
    return most if parallel == 1 else min(most, max(LEAST_UPLOAD_BYTES, -(-num_bytes // parallel)))


def commit(save: Save, point: RunPoint, *, num_processes: int = 1, keep: Keep = None) -> Place:
    """Makes a checkpoint of what the processes have written, atomically.

    Raises CheckpointError if the part file of a process is missing, processes disagree about the tensors, or
    boxes do not cover a tensor exactly once.
    """
    rules = rules_of(keep, point.metrics)
    final = step_directory(save.out, save.step)
    assert point.step == save.step, (point.step, save.step)
    with _explained(final):
        manifest = merged(save.directory, final, point, num_processes, saved_at=now(), keep=rules)
        declared = [save.directory / declared_name(process) for process in range(num_processes)]
        steps_at(final).publish(save.directory, final, manifest, declared)
    try:
        steps_at(final).make_durable(final)
    except OSError as error:
        raise CheckpointError(
            f"{final}: the checkpoint is written, and might not survive a loss of power: {error.strerror}."
        ) from error
    delete_old(save.out, final, rules)
    return final


def now() -> datetime:
    """The time of a commit, UTC."""
    return datetime.now(UTC)


def _info_of(owned: OwnedBox, known: dict[str, TensorInfo]) -> TensorInfo:
    info = known.get(owned.name)
    if info is None:
        raise CheckpointError(
            f"a box of '{owned.name}' was given, and no such tensor was declared. {did_you_mean(owned.name, known)}",
            code="SW504",
        )
    if len(owned.box.start) != len(info.shape) or not Box.whole(info.shape).contains(owned.box):
        raise CheckpointError(
            f"tensor '{info.name}': the box [{owned.box}] is not within its shape {info.shape}.", code="SW501"
        )
    if (num_bytes := owned.box.size * DTYPES[info.dtype].num_bytes) > MAX_BOX_BYTES:
        raise CheckpointError(
            f"tensor '{info.name}': the box [{owned.box}] has {num_bytes:,} bytes, needed at most {MAX_BOX_BYTES:,}. "
            f"Save it as several boxes.",
            code="SW501",
        )
    return info


def explained(save: Save) -> AbstractContextManager[None]:
    """A context that turns an error of the operating system into one message about the checkpoint of a save."""
    return _explained(step_directory(save.out, save.step))


@contextmanager
def _explained(final: Place) -> Iterator[None]:
    """Turns an error of the operating system or a store into one message about the checkpoint ``final``."""
    try:
        yield
    except OSError as error:
        raise steps_at(final).failure(final, error) from error
