"""A folder of another program becomes a checkpoint, and a checkpoint becomes such a folder: what does not depend on the program.

A folder that was exported has a record of the checkpoint beside its tensors, so that an import of it is the exact inverse.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwright.checkpoint import Checkpoint, CheckpointError, RunPoint, TensorInfo
from shardwright.core.findings.bounds import is_integer
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.patterns import names_of

Progress = Callable[[int, int], None]
"""Called with the bytes that are done and all bytes."""

RECORD = "shardwright"
"""The name of the record in a folder that was exported."""
VERSION = 1
POINT_FIELDS: Mapping[str, type] = {
    "step": int,
    "seed": int,
    "data_position": int,
    "model": str,
    "layout_name": str,
    "layout_text": str,
    "mesh": dict,
    "metadata": dict,
}
MOST_STEP = 10**18


def unseen(done: int, total: int) -> None:
    """Progress that nobody sees."""
    del done, total


def counted(progress: Progress, total: int) -> Callable[[int], None]:
    """A function that is called with more and more bytes that are done."""
    done = 0

    def count(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        progress(done, total)

    return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What an exported folder says of the checkpoint. ``tensors``: the name there, the name here and the spec of each."""

    point: RunPoint
    tensors: tuple[tuple[str, str, str], ...]

    def text(self) -> str:
        value = {"version": VERSION, "point": asdict(self.point), "tensors": self.tensors}
        return json.dumps(value, allow_nan=False)


def record_of(checkpoint: Checkpoint, name_of: Callable[[str], str]) -> Record:
    """The record of a checkpoint. ``name_of``: the name that a tensor gets in the folder."""
    tensors = tuple((name_of(info.name), info.name, info.spec) for info in checkpoint.tensors.values())
    return Record(point=checkpoint.point, tensors=tensors)


def read_record(place: str, text: Any) -> Record:
    """A record as it was written. Raises CheckpointError for any other text."""
    try:
        value = json.loads(text) if type(text) is str else None
    except (ValueError, RecursionError):
        value = None
    if type(value) is not dict or value.get("version") != VERSION:
        raise CheckpointError(
            f"{place}: its entry '{RECORD}' is no record that this release has written. Leave it out with --leave-out {RECORD}, "
            f"and the folder is imported as any other."
        )
    point: Any = value.get("point")
    tensors: Any = value.get("tensors")
    good = type(point) is dict and all(type(point.get(key)) is kind for key, kind in POINT_FIELDS.items())
    good = good and type(tensors) is list
    good = good and all(type(one) is list and [type(each) for each in one] == [str] * 3 for one in tensors)
    if not good or not all(is_integer(size) for size in point["mesh"].values()):
        raise CheckpointError(f"{place}: its entry '{RECORD}' is damaged. Leave it out with --leave-out {RECORD}.")
    return Record(
        point=RunPoint(**{key: point[key] for key in POINT_FIELDS}), tensors=tuple((a, b, c) for a, b, c in tensors)
    )


def recorded(place: str, record: Record, found: Mapping[str, TensorInfo]) -> Mapping[str, TensorInfo]:
    """The tensors of a record, by their names in the folder. Raises CheckpointError for those that the folder lacks."""
    missing = [name for name, _, _ in record.tensors if name not in found]
    if missing:
        raise CheckpointError(f"{place}: {names_of(missing)} of the exported checkpoint is missing.", code="SW504")
    return {
        there: TensorInfo(name=here, shape=found[there].shape, dtype=found[there].dtype, spec=spec)
        for there, here, spec in record.tensors
    }


def point_of(record: Record, step: int | None) -> RunPoint:
    """The point of an exported checkpoint, which is that of one step. Raises InputError for another ``step``."""
    if step is not None and step != record.point.step:
        raise InputError(
            f"--step is {step}, and the exported checkpoint is of step {record.point.step}. Leave out --step."
        )
    return record.point


def step_of(folder: Path, step: int | None) -> int:
    """The step that was given, or the number at the end of the folder's name. Raises InputError where there is none."""
    if step is not None:
        if not 0 <= step < MOST_STEP:
            raise InputError(f"--step is {step}, and must be from 0 to {MOST_STEP - 1:,}.")
        return step
    number = number_at_end(folder)
    if number is None:
        raise InputError(f"{folder}: its name does not end in the number of a step. Give it with --step.")
    return number


def number_at_end(folder: Path) -> int | None:
    """
    >>> number_at_end(Path("checkpoints/step-100")), number_at_end(Path("/last"))
    (100, None)
    """
    found = re.search(r"([0-9]{1,18})$", folder.resolve().name)
    return None if found is None else int(found[1])


def refuse(folder: Path, what: str, lines: Collection[str], fix: str) -> None:
    """Raise CheckpointError with a line for each entry that cannot be imported, if there are any."""
    if lines:
        shown = [f"  {line}" for line in list(lines)[:20]]
        shown += [f"  ... and {len(lines) - 20} more"] if len(lines) > 20 else []
        raise CheckpointError(f"{folder}: {what}, and nothing was written:", lines=[*shown, fix], code="SW504")
