"""The findings of `check`: a locked plan moved (SW601), and something was not checked (SW603)."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.layout.declaration import DeclaredChange
from shardwright.core.layout.wording import bytes_text, count, every
from shardwright.locks.difference import CompiledDifference, Difference, TensorChange

MOST_CHANGES = 5
"""The most lines of a finding about declarations, and about tensors: the table above it has all."""


def moved_finding(
    found: Difference, changes: Sequence[DeclaredChange], *, lock: str, update: str, position: Position | None
) -> Finding:
    """SW601. ``position``: where to show it when no statement of the layout's file caused it."""
    declared = next((change for change in changes if change.position is not None), None)
    lines = [f"{_counted(found)}, since {lock} was written"]
    lines += _first([change.text for change in found.reported_fields], "field")
    lines += _first([change.text for change in changes], "statement")
    if not changes and not found.requested:
        lines.append("the layout is unchanged: the model's table, a default or shardwright itself has changed")
    lines += _first([_tensor_line(change) for change in _largest_first(found.tensors)], "tensor")
    return Finding(
        code="SW601",
        severity="error",
        where=f"{found.after.model} under {found.after.layout}",
        position=position if declared is None else declared.position,
        found="\n".join(lines),
        needed=f"what {lock} holds, or a lock of the present plan",
        fix=update,
        cost=_cost(found),
    )


def skipped_finding(what: str, why: str, *, where: str, fix: str = "") -> Finding:
    """SW603. ``what`` was not checked, and ``why``; ``fix``: how to have it checked."""
    return Finding(code="SW603", severity="info", where=where, found=f"{what}: not checked", needed=why, fix=fix)


def _counted(found: Difference) -> str:
    weights = sum(change.kind == "weight" for change in found.tensors)
    numbers = {
        "weight": weights,
        "activation": len(found.tensors) - weights,
        "collective": len(found.collectives),
        "field": len(found.reported_fields),
    }
    parts = [count(number, noun) for noun, number in numbers.items() if number]
    if found.mesh_moved:
        parts.append("the mesh")
    if any(before != after for before, after in found.memory.values()):
        parts.append("the memory of a device")
    if found.compiled is not None and found.compiled.moved:
        parts.append("the compiled program")
    return f"{every(parts)} moved"


def _first(lines: Sequence[str], noun: str) -> list[str]:
    """The first ``MOST_CHANGES`` lines, and the number of the others."""
    shown = list(lines[:MOST_CHANGES])
    more = len(lines) - len(shown)
    return [*shown, f"and {count(more, f'more {noun}')}"] if more else shown


def _largest_first(changes: Sequence[TensorChange]) -> list[TensorChange]:
    def moved_bytes(change: TensorChange) -> int:
        before, after = (num or 0 for num in change.bytes_per_device)
        return abs(after - before) * change.num

    return sorted(changes, key=moved_bytes, reverse=True)


def _tensor_line(change: TensorChange) -> str:
    pairs = (change.at_rest, change.in_use, change.shape, change.dtype, change.in_update, change.gradient)
    before, after = next((pair for pair in pairs if pair[0] != pair[1]), (None, None))
    sizes = [bytes_text(number) for number in change.bytes_per_device if number is not None]
    if change.change != "moved":
        return f"{change.name} is {'new' if change.change == 'added' else 'gone'}: {before or after}, {sizes[0]}"
    grown = f"{sizes[0]} -> {sizes[1]}" if sizes[0] != sizes[1] else sizes[0]
    return f"{change.name}: {before} -> {after}, {grown}" if before is not None else f"{change.name}: {grown}"


def _cost(found: Difference) -> str:
    texts = [
        _grown("sent or received in a step", found.bytes_per_step),
        _grown("memory", found.memory.get("total_bytes_per_device", (0, 0))),
    ]
    if found.compiled is not None:
        texts += _compiled_cost(found.compiled)
    lines = [text for text in texts if text]
    return f"of a device: {'; '.join(lines)}" if lines else ""


def _compiled_cost(found: CompiledDifference) -> list[str]:
    return [
        _grown("in the compiled program's collectives", found.bytes_per_step),
        _grown("at the compiled program's peak", found.memory.get("peak_bytes", (0, 0))),
    ]


def _grown(what: str, pair: tuple[int, int]) -> str:
    before, after = pair
    if before == after:
        return ""
    times = f", x{after / before:.3g}" if before else ""
    return f"{bytes_text(before)} -> {bytes_text(after)} {what}{times}"
