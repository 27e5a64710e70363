"""SW313: a compiler of another version than JAX requires."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.reading.program import CompiledProgram, Tool
from shardwright.compiled.reading.tool_chain import is_wanted
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def tools(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """A warning, because the program could be read."""
    del plan, agreement
    for tool in program.tools:
        if not is_wanted(tool):
            yield wrong_version(tool, "warning")


def wrong_version(tool: Tool, severity: Severity = "error") -> Finding:
    """The finding about a package; an error if the program could not be read because of it."""
    return Finding(
        code="SW313",
        severity=severity,
        where=f"package '{tool.name}'",
        found=f"{tool.version} is installed",
        needed=f"{tool.name}=={tool.wanted}, which this release of JAX requires: it may not be able to read the "
        "programs of other versions",
        fix=f"pip install '{tool.name}=={tool.wanted}'",
    )
