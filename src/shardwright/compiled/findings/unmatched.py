"""SW302: collectives that the plan does not expect, and collectives that the program lacks."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.matching import AgreementRow
from shardwright.compiled.findings.wording import cost_of, of_tensors, place, several_times
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.thresholds import UNMATCHED_ERROR_SHARE
from shardwright.core.plan.plan import Plan

SUMS = ("all-reduce", "reduce-scatter")
"""Kinds without which results are wrong, if nothing replaces them."""


def unmatched(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """One finding for each row that no rewrite explains, the largest first."""
    everything = sum(row.bytes for row in agreement.rows)
    for row in sorted(agreement.of_state("unmatched"), key=lambda row: -abs(row.difference)):
        found = [
            one
            for one in program.collectives
            if (one.component, one.kind) == (row.component, row.kind) and set(one.axes) == set(row.axes)
        ]
        planned = [
            one
            for one in plan.collectives
            if (one.component, one.kind) == (row.component, row.kind) and set(one.axes) == set(row.axes)
        ]
        named = next((name for one in (*found, *planned) for name in one.tensors), None)
        yield Finding(
            code="SW302",
            severity=_severity(row, everything),
            where=place(row.component, row.kind, row.axes),
            tensor=named,
            found=several_times(row.compiled_bytes, row.compiled_count) + of_tensors(found),
            needed=several_times(row.predicted_bytes, row.predicted_count, like=row.compiled_bytes or None)
            + (f"\n{_why_wrong(row)}" if _is_missing_sum(row) else ""),
            cost=""
            if _is_missing_sum(row)
            else cost_of(plan, abs(row.difference), row.axes, "more" if row.difference > 0 else "less"),
        )


def _severity(row: AgreementRow, everything: int) -> Severity:
    if _is_missing_sum(row):
        return "error"
    if row.difference < 0:
        return "info"
    return "error" if row.difference >= UNMATCHED_ERROR_SHARE.value * everything else "warning"


def _is_missing_sum(row: AgreementRow) -> bool:
    return row.kind in SUMS and row.predicted_bytes > 0 and row.compiled_bytes == 0


def _why_wrong(row: AgreementRow) -> str:
    return f"without a sum over {'/'.join(row.axes)} somewhere, each device continues with a partial result"
