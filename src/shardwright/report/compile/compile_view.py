"""The view of a compiled program, compared with its plan: memory, collectives, the largest temporaries, findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.compiled.agreement.agreement import Agreement
from shardwright.compiled.agreement.rewrites import TORCH, family
from shardwright.compiled.reading.program import CompiledProgram, exposures
from shardwright.core.findings.finding import Finding
from shardwright.core.plan.plan import Plan
from shardwright.report.compile.agreement_view import agreement_table
from shardwright.report.compile.compiled_memory_view import compiled_memory_table, ranks_table, temporaries_table
from shardwright.report.compile.exposure_view import exposure_table
from shardwright.report.plan.answer_view import answer_view
from shardwright.report.plan.findings_view import findings_list
from shardwright.report.plan.head import head, title
from shardwright.report.text.columns import section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_seconds, several


def compile_view(
    plan: Plan,
    program: CompiledProgram,
    agreement: Agreement,
    findings: Sequence[Finding],
    chosen: Mapping[str, str],
) -> View:
    """Draws a compiled program. ``findings``: all findings to show, with those of the plan if they are wanted."""

    def view(width: int) -> RenderableType:
        colors = AxisColors.of(plan.mesh.shape)
        parts = [
            title(plan),
            answer_view(plan, findings, width),
            Text(""),
            head(plan, colors, chosen, width),
            _compiled(program),
            section("memory of one device", compiled_memory_table(plan, program, width)),
            section(
                "collectives of one step, per device: predicted and compiled", agreement_table(agreement, colors, width)
            ),
        ]
        if found := exposures(program.collectives):
            parts.append(section("communication that the schedule leaves exposed", exposure_table(plan, found, width)))
        if program.ranks:
            parts.append(
                section("peak memory of each rank: planned and in the dry run", ranks_table(program.ranks, width))
            )
        if program.memory.largest:
            parts.append(section("largest temporaries of one device", temporaries_table(program, width)))
        return Group(*parts, *([Text("findings\n", style="bold"), findings_list(findings, width)] if findings else []))

    return view


def _compiled(program: CompiledProgram) -> Text:
    if family(program.target.split(":")[0]) == TORCH:
        line = Text.assemble("dry run as ", (program.target, "bold"), f" in {pretty_seconds(program.compile_seconds)}")
        line.append(": the stages of each rank, " if program.ranks else ": one rank, ")
        line.append("shapes without values")
        for assumption in program.notes:
            line.append(f"; {assumption}")
        return line.append("\n")
    ops = sum(one.num_ops for one in program.collectives)
    line = Text.assemble("compiled for ", (program.target, "bold"), f" in {pretty_seconds(program.compile_seconds)}")
    line.append(f": {several(ops, 'tensor')} in the collectives of its text")
    for tool in program.tools:
        line.append(f"; {tool.name} {tool.version}")
    for name, value in program.options.items():
        line.append(f"; {name}={value}")
    return line.append("\n")
