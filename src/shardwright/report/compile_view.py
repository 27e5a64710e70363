"""What a compiler made of a plan, beside the plan: memory, collectives, the largest temporaries, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.compiled.agreement import Agreement
from shardwright.compiled.program import CompiledProgram
from shardwright.core.finding import Finding
from shardwright.core.plan import Plan
from shardwright.report.findings_view import counted, findings_list
from shardwright.report.head import head
from shardwright.report.notation_text import AxisColors
from shardwright.report.terminal import View
from shardwright.report.units import several


def compile_view(
    plan: Plan,
    program: CompiledProgram,
    agreement: Agreement,
    findings: Sequence[Finding],
    chosen: Mapping[str, str],
) -> View:
    """Draws a compiled program. ``findings``: all that are to be shown, the plan's among them where they should be."""

    def view(width: int) -> RenderableType:
        colors = AxisColors.of(plan.mesh.shape)
        unmatched = len(agreement.of_state("unmatched"))
        compiled = Text(f"compiled for {program.target}: {several(unmatched, 'collective')} unmatched\n")
        title = Text.assemble(("findings", "bold"), f": {counted(findings)}")
        parts = [head(plan, colors, chosen), compiled, title]
        return Group(*parts, *([Text(""), findings_list(findings, width)] if findings else []))

    return view
