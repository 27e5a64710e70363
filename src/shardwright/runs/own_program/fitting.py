"""The tensors of a checkpoint against those that a program asks for: equal names, shapes and dtypes, or what the user asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardwright.checkpoint import Checkpoint, CheckpointError
from shardwright.checkpoint.reading.expected import mismatches
from shardwright.core.findings.nearest import nearest

Wanted = Mapping[str, tuple[Sequence[int], str]]
"""Shape and dtype of each tensor of the program, by its name in the checkpoint."""

FLOATING = frozenset(("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"))
"""The dtypes that ``cast=True`` casts to each other. Of others a cast changes values that are not rounded, so it is refused."""
SHOWN = 20
EXTRA = "which is not asked for"


def misfits(
    checkpoint: Checkpoint, wanted: Wanted, *, unread: Collection[str] = (), cast: bool = False, partial: bool = False
) -> list[str]:
    """A line for each tensor that a program loads and that does not fit; none if all do.

    ``unread``: tensors of the checkpoint that the program does not ask for. With ``partial`` it asks for no others either.
    With ``cast``, floating dtypes may differ.
    """
    found = {
        name: info for name, info in checkpoint.tensors.items() if name in wanted or not (partial or name in unread)
    }
    needed = {
        name: (shape, found[name].dtype if cast and name in found and castable(found[name].dtype, dtype) else dtype)
        for name, (shape, dtype) in wanted.items()
    }
    return [line.replace("which this run does not have", EXTRA) for line in mismatches(found, needed)]


def value_misfits(saved: Mapping[str, Any], wanted: Collection[str], *, partial: bool = False) -> list[str]:
    """The same for values, of which only the names are compared."""
    extra = [name for name in saved if name not in wanted]
    lines = []
    for name in wanted:
        if name not in saved:
            near = nearest(name, extra)
            lines.append(f"'{name}': missing" + (f"; the checkpoint has '{near}'" if near else ""))
    return lines + ([] if partial else [f"'{name}': extra, {saved[name]!r:.80}, {EXTRA}" for name in extra])


def require_none(checkpoint: Checkpoint, lines: Sequence[str], *, cast: bool = False, partial: bool = False) -> None:
    """Raise CheckpointError (SW504) with all lines, if there are any, and what permits them."""
    if not lines:
        return
    fixes = []
    if not cast and any("dtype: found" in line for line in lines):
        fixes.append("cast=True casts floating dtypes")
    if not partial and any(": extra" in line or ": missing" in line for line in lines):
        fixes.append("only=[patterns] loads some of the names")
    shown = [f"  {line}" for line in lines[:SHOWN]]
    shown += [f"  ... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    raise CheckpointError(
        f"{checkpoint.directory}: the checkpoint does not fit, and nothing of it was loaded:",
        lines=[*shown, *([f"On request: {'; '.join(fixes)}."] if fixes else [])],
        code="SW504",
    )


def castable(found: str, needed: str) -> bool:
    """Whether ``cast=True`` casts a dtype to another.

    >>> castable("float32", "bfloat16"), castable("int32", "float32")
    (True, False)
    """
    return found in FLOATING and needed in FLOATING
