"""What a rank does of a load by all ranks: the elements that it has afterwards, the bytes that it has read, and how it fails."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch.distributed as dist

from shardwright.checkpoint import open_checkpoint
from shardwright.checkpoint.exchange import rings, units
from shardwright.checkpoint.reading import streams
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.training import state as states
from shardwright.engine_torch.training.state import State, boxes_of, load_state
from shardwright.storage.files import open_regular
from tests.checkpoint.reads import Counted, refused
from tests.engine_torch.training import model_of


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLoad:
    """``wrong``: the boxes of this rank, also of replicas, that differ from the arrays. ``num_boxes``: how many it has."""

    wrong: tuple[str, ...]
    num_boxes: int
    bytes_read: int


def load_counted(plan: Plan, directory: Path | str, arrays: Path, unit_bytes: int, round_bytes: int) -> RankLoad:
    """``arrays``: a file of NumPy with what the tensors must be."""
    needed = np.load(arrays)
    Counted.total = 0
    with (
        patch.object(streams, "open_regular", Counted),
        patch.object(units, "UNIT_BYTES", unit_bytes),
        patch.object(rings, "ROUND_BYTES", round_bytes),
    ):
        state = load_state(model_of(plan), open_checkpoint(directory, all_files=False))
    boxes = list(_all_boxes(state))
    wrong = tuple(f"{name} {box}" for name, box, bits in boxes if bits != needed[name][box.slices].tobytes())
    return RankLoad(wrong=wrong, num_boxes=len(boxes), bytes_read=Counted.total)


def _all_boxes(state: State) -> Sequence[tuple[str, Any, bytes]]:
    with patch.object(states, "saves", lambda *_: True):
        return [
            (one.name, one.box, np.asarray(one.array() if callable(one.array) else one.array).tobytes())
            for one in boxes_of(state)
        ]


def load_failing(plan: Plan, directory: Path, failing: int) -> tuple[str, str]:
    """The kind and the text of the error of a rank, where rank ``failing`` cannot open a data file."""

    opens = refused if dist.get_rank() == failing else open_regular
    try:
        with patch.object(streams, "open_regular", opens):
            load_state(model_of(plan), open_checkpoint(directory, all_files=False))
    except InputError as error:
        return type(error).__name__, str(error)
    return "", ""


def load_killed(plan: Plan, directory: Path, killed: int, found: Path) -> None:
    """A load in which rank ``killed`` ends when it reads. The others write the kind of their error to a file in ``found``."""
    ends = (lambda _: os._exit(9)) if dist.get_rank() == killed else open_regular
    try:
        with patch.object(streams, "open_regular", ends):
            load_state(model_of(plan), open_checkpoint(directory, all_files=False))
    except RuntimeError as error:
        (found / str(dist.get_rank())).write_text(type(error).__name__)
