"""What there is to say of a compiled program beside its plan. Each file holds one family of checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shardwright.compiled.agreement import Agreement
from shardwright.compiled.program import CompiledProgram
from shardwright.core.finding import Finding, worst_first
from shardwright.core.plan import Plan

CHECKS: tuple[Callable[[Plan, CompiledProgram, Agreement], Iterator[Finding]], ...] = ()


def compiled_findings(plan: Plan, program: CompiledProgram, agreement: Agreement) -> tuple[Finding, ...]:
    """Every finding about a compiled program, the worst first. The plan's own are not among them."""
    return worst_first(finding for check in CHECKS for finding in check(plan, program, agreement))
