"""SW123: settings of a model that change only what is learned, and that neither engine computes."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.model.training_only import TrainingOnly
from shardwright.core.plan.plan import Plan


def training_only(plan: Plan) -> Iterator[Draft]:
    """One warning for each."""
    for row in plan.request.table.training_only:
        yield Draft(finding=training_only_finding(row))


def training_only_finding(row: TrainingOnly) -> Finding:
    return Finding(
        code="SW123",
        severity="warning",
        where=f"'{row.key}'",
        position=row.position,
        found=f"{row.value}: training here lacks {row.part}",
        needed="nothing for outputs; a run here learns without it",
    )
