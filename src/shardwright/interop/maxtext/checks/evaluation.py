"""SW111 between training and evaluation: rules for evaluation are written for another mesh and used on that of training."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import every
from shardwright.interop.maxtext.checks.drafted import Drafted
from shardwright.interop.maxtext.resolution.placement import Imported


def evaluated_elsewhere(imported: Imported) -> Iterator[Drafted]:
    """Axes in the rules for evaluation that the mesh of training lacks, and axes of that mesh that they never name."""
    rules, mesh = imported.configuration.eval_rules, imported.mesh
    named = dict.fromkeys(axis for line in rules for axis in line.axes)
    absent = [axis for axis in named if axis not in mesh.shape]
    left = [axis for axis in mesh.larger_than_one(mesh.names) if axis not in named]
    if not rules or not (absent or left):
        return
    place = next((line.position for line in rules if set(line.axes) & set(absent)), rules[0].position)
    messages = []
    if absent:
        messages.append(f"they name {every(map(repr, absent))}, which the mesh of training does not have")
    if left:
        messages.append(
            f"{every(f'{axis!r} ({mesh.size(axis)})' for axis in left)} of that mesh shards nothing under them"
        )
    yield Draft(
        finding=Finding(
            code="SW111",
            severity="error",
            where="rules for evaluation",
            position=place,
            found="; ".join(messages),
            needed=f"rules for the mesh that both run on: {', '.join(mesh.names)}",
        )
    )
