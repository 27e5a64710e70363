"""The view of findings: the law, then where, found, needed, fix and cost, with a caret under the notation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.findings.codes import SEVERITIES
from shardwright.core.findings.finding import Finding, count_by_severity, worst_first
from shardwright.report.text.columns import laid_out
from shardwright.report.text.wrapping import hanging, wrapped

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}

LABEL = 9
"""Columns before every text: an indent of two, a label, a space."""


def findings_list(findings: Iterable[Finding], width: int) -> RenderableType:
    """Every finding, the worst first."""
    parts: list[RenderableType] = []
    for finding in worst_first(findings):
        if parts:
            parts.append(Text(""))
        parts.append(finding_block(finding, width))
    return Group(*parts)


def finding_block(finding: Finding, width: int) -> RenderableType:
    style = STYLES[finding.severity]
    head = Text.assemble((f"{finding.severity} {finding.code}", style), ": ", (finding.law, "bold"))
    lines: list[Text] = []
    for label, text in finding.lines():
        if label:
            lines += hanging(Text(f"  {label}".ljust(LABEL), style="dim"), Text(text), width)
        else:
            lines += [Text(" " * LABEL) + line for line in _with_caret(text, style, width - LABEL)]
    return Group(head, *(laid_out(line) for line in lines))


def counted(findings: Sequence[Finding]) -> str:
    """The number of findings of each severity, in words.

    >>> counted([])
    'no findings'
    """
    counts = count_by_severity(findings)
    parts = [
        f"{counts[severity]} {severity}{'s' if counts[severity] > 1 and severity != 'info' else ''}"
        for severity in SEVERITIES
        if counts[severity]
    ]
    return ", ".join(parts) or "no findings"


def _with_caret(text: str, style: str, width: int) -> list[Text]:
    """The notation and the caret below it, which must stay in its column: each line that the caret reaches has its part of it."""
    notation, _, mark = text.partition("\n")
    first, last = mark.index("^"), len(mark.rstrip())
    lines: list[Text] = []
    begin = 0
    for line in wrapped(Text(notation), width):
        begin = notation.index(line.plain, begin)
        end = begin + len(line)
        lines.append(line)
        if first < end and last > begin:
            start = max(first, begin)
            lines.append(Text.assemble(" " * (start - begin), ("^" * (min(last, end) - start), style)))
        begin = end
    return lines
