"""SW101 past MaxText's own guard, which divides elements by bytes and so finds a quarter or half of the replicated share."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import REPLICATED_ERROR_SHARE
from shardwright.core.layout.wording import bytes_text, every, others, percent
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.vocabulary import GUARD_TOLERANCE, GUARDED
from shardwright.interop.maxtext.resolution.placement import Imported


def guard_lets_through(imported: Imported) -> Iterator[Drafted]:
    """Weights not sharded by all of the guard's axes, where their share exceeds its tolerance in bytes but not in its own count."""
    axes = imported.mesh.larger_than_one(axis for axis in GUARDED if axis in imported.mesh.shape)
    replicated = [placed for placed in imported.weights if not set(axes) <= set(placed.axes)]
    total = sum(placed.tensor.bytes for placed in imported.weights)
    if not axes or not replicated:
        return
    share = sum(placed.tensor.bytes for placed in replicated) / total
    as_it_counts = sum(prod(placed.tensor.shape) for placed in replicated) / total
    configured = imported.configuration.value_of("sharding_tolerance")
    tolerance = GUARD_TOLERANCE if configured is None else float(configured)
    off = "stage" in axes
    if share <= tolerance or (as_it_counts > tolerance and not off):
        return
    replicated.sort(key=lambda placed: -placed.tensor.bytes)
    why = (
        "it does not run with pipeline stages"
        if off
        else f"it divides elements by bytes, finds {percent(as_it_counts)}, and tolerates {percent(tolerance)}"
    )
    scalar = imported.configuration.settings.get("sharding_tolerance")
    yield Draft(
        finding=Finding(
            code="SW101",
            severity="error" if share >= REPLICATED_ERROR_SHARE.value else "warning",
            tensor=replicated[0].tensor.name,
            where=f"what MaxText's guard lets through over {every(map(repr, axes))}",
            position=scalar.position if scalar else imported.configuration.rules_from,
            notation=replicated[0].notation,
            mark=(0, len(replicated[0].notation)),
            found=f"{bytes_text(sum(p.tensor.bytes for p in replicated), like=total)} of {bytes_text(total)} of weights "
            f"({percent(share)}) are not sharded by all of these axes, and the guard against that reports nothing: {why}\n"
            f"{others([p.tensor.name for p in replicated], 'weight')}",
            needed=f"at most {percent(tolerance)} of the bytes, the limit that the guard intends",
        )
    )
