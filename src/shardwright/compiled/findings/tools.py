"""SW313: a compiler of another version than JAX asks for."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.reading.program import CompiledProgram, Tool
from shardwright.compiled.reading.tool_chain import is_wanted
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan


def tools(plan: Plan, program: CompiledProgram, agreement: Agreement) -> Iterator[Finding]:
    """A warning: this time its program could be read."""
    del plan, agreement
    for tool in program.tools:
        if not is_wanted(tool):
            yield wrong_version(tool, "warning")


def wrong_version(tool: Tool, severity: Severity = "error") -> Finding:
    """The finding about a package; an error where its program could not be read for it."""
    return Finding(
        code="SW313",
        severity=severity,
        where=f"package '{tool.name}'",
        found=f"{tool.version} is installed",
        needed=f"{tool.name}=={tool.wanted}, which this release of JAX asks for: the text of other versions' programs "
        "may be one that it cannot read",
        fix=f"pip install '{tool.name}=={tool.wanted}'",
    )
