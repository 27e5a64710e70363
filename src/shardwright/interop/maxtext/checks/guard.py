"""SW101 past MaxText's own guard, which divides elements by bytes and so sees a quarter or half of what is replicated."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.core.findings.codes import REPLICATED_ERROR_SHARE
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, every, others, percent
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.reading.vocabulary import GUARD_TOLERANCE, GUARDED
from shardwright.interop.maxtext.resolution.placing import Imported


def guard_lets_through(imported: Imported) -> Iterator[Drafted]:
    """Weights that some axis of the guard's does not cut: more than it tolerates by bytes, and fewer by its own sum."""
    axes = imported.mesh.larger_than_one(axis for axis in GUARDED if axis in imported.mesh.shape)
    whole = [placed for placed in imported.weights if not set(axes) <= set(placed.axes)]
    total = sum(placed.tensor.bytes for placed in imported.weights)
    if not axes or not whole:
        return
    share = sum(placed.tensor.bytes for placed in whole) / total
    as_it_counts = sum(prod(placed.tensor.shape) for placed in whole) / total
    said = imported.configuration.says("sharding_tolerance")
    tolerance = GUARD_TOLERANCE if said is None else float(said)
    off = "stage" in axes
    if share <= tolerance or (as_it_counts > tolerance and not off):
        return
    whole.sort(key=lambda placed: -placed.tensor.bytes)
    why = (
        "it is not asked where there are pipeline stages"
        if off
        else f"it divides elements by bytes, finds {percent(as_it_counts)}, and tolerates {percent(tolerance)}"
    )
    word = imported.configuration.settings.get("sharding_tolerance")
    yield Draft(
        finding=Finding(
            code="SW101",
            severity="error" if share >= REPLICATED_ERROR_SHARE.value else "warning",
            tensor=whole[0].tensor.name,
            where=f"what MaxText's guard lets through over {every(map(repr, axes))}",
            position=word.position if word else imported.configuration.rules_from,
            notation=whole[0].notation,
            mark=(0, len(whole[0].notation)),
            found=f"{bytes_text(sum(p.tensor.bytes for p in whole), like=total)} of {bytes_text(total)} of weights "
            f"({percent(share)}) are not cut by all of these axes, and the guard against that says nothing: {why}\n"
            f"{others([p.tensor.name for p in whole], 'weight')}",
            needed=f"at most {percent(tolerance)} of the bytes, as the guard means to hold",
        )
    )
