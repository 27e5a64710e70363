"""A tied weight has several names. Our checkpoints have its first one; those of other programs have all, or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.checkpoint import Checkpoint, CheckpointError
from shardwright.core.boxes.held import Reading
from shardwright.engine_torch.own_program.shards import Shards, boxes_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """``read_as``: the name that a checkpoint has in place of the first one, by the first one. ``repeated``: the first name by each
    other name, where it has both.
    """

    read_as: Mapping[str, str]
    repeated: Mapping[str, str]


def tied_in(checkpoint: Checkpoint, tied: Mapping[str, str]) -> Tied:
    """What a checkpoint has of tied tensors. ``tied``: the first name of each by its other names."""
    there = {other: first for other, first in tied.items() if other in checkpoint.tensors}
    alone = {first: other for other, first in there.items() if first not in checkpoint.tensors}
    return Tied(read_as=alone, repeated={other: alone.get(first, first) for other, first in there.items()})


def in_one_place(tensors: Mapping[str, Shards]) -> Mapping[str, str]:
    """The first name of each tensor by its other names, where several names have the same memory on this rank.

    A rank that holds no element of some tensors cannot tell which of them are one: it takes those of one shape and dtype for one, and
    the ranks that do hold elements find what is missing.
    """
    firsts: dict[object, str] = {}
    found: dict[str, str] = {}
    for name, one in tensors.items():
        here = (one.local.data_ptr(), one.local.stride(), one.local.device) if one.local.numel() else None
        first = firsts.setdefault((one.shape, one.dtype, tuple(one.local.shape), here), name)
        if first != name:
            found[name] = first
    return found


def unlike(checkpoint: Checkpoint, repeated: Mapping[str, str]) -> list[str]:
    """A line for each tensor whose names are tensors of different shapes or dtypes in a checkpoint."""
    lines = []
    for other, first in repeated.items():
        one, two = checkpoint.tensors[first], checkpoint.tensors[other]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            lines.append(
                f"'{other}': {two.dtype} {two.shape}, and '{first}' {one.dtype} {one.shape}; both are one tensor of this module"
            )
    return lines


def with_tied(lines: Sequence[str], saved: Mapping[str, str]) -> list[str]:
    """Lines about tensors that do not fit; that of a missing one says under which name it was saved. ``saved``: the first name of each
    tied tensor of the checkpoint by its other names.

    >>> with_tied(["'head': missing", "'b': missing"], {"head": "embed"})
    ["'head': missing; it was tied to 'embed' when it was saved, and has that name only", "'b': missing"]
    """
    missing = {f"'{other}': missing": first for other, first in saved.items()}
    return [
        f"{line}; it was tied to '{missing[line]}' when it was saved, and has that name only"
        if line in missing
        else line
        for line in lines
    ]


def require_equal(checkpoint: Checkpoint, other: str, one: Shards, reading: Reading | None) -> None:
    """Raises CheckpointError where this rank's boxes of a tied tensor have other bits under its other name."""
    boxes = [each.box for each in boxes_of(one, reading) if each.box.size]
    for box in boxes:
        [first], [second] = (checkpoint.read_boxes(name, [box], raw=True) for name in (one.name, other))
        # NumPy views no array without dims as bytes.
        if not np.array_equal(first.reshape(-1).view(np.uint8), second.reshape(-1).view(np.uint8)):
            raise CheckpointError(
                f"{checkpoint.directory}: '{one.name}' and '{other}' have other values, and are one tensor of this module. Load it "
                f"into a module that does not tie them.",
                code="SW504",
            )
