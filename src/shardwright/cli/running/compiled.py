"""The result of `compile`, for any engine: a plan and its compiled program."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.reading.program import CompiledProgram
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """A plan, its compiled program, how far they agree, and the findings."""

    plan: Plan
    program: CompiledProgram
    agreement: Agreement
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        """The JSON contract of ``compile``: the plan's, and the compiled program."""
        return {
            **self.plan.to_json(),
            "findings": [finding.to_json() for finding in self.findings],
            "target": self.program.target,
            "compiled": self.program.to_json(),
            "agreement": self.agreement.to_json(),
        }
