"""The view of findings: the law, then where, found, needed, fix and cost, with a caret under the notation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwright.core.findings.codes import SEVERITIES
from shardwright.core.findings.finding import Finding, count_by_severity, worst_first

STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}

ELLIPSIS = "..."
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
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(style="dim", width=6)
    grid.add_column(overflow="fold")
    for label, text in finding.lines():
        if label:
            grid.add_row(label, Text(text))
        else:
            grid.add_row("", _with_caret(text, style, width - LABEL))
    return Group(head, Padding(grid, (0, 0, 0, 2)))


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


def _with_caret(text: str, style: str, width: int) -> Text:
    """The notation and the caret below it, which must stay in its column.

    Neither line wraps: of a notation that is too long, only the text around the caret is shown.
    """
    notation, _, mark = text.partition("\n")
    first, length = mark.index("^"), mark.count("^")
    if len(notation) > width:
        shown = max(width - 2 * len(ELLIPSIS), 1)
        start = min(max(0, first + length // 2 - shown // 2), len(notation) - shown)
        before, after = (ELLIPSIS if start else ""), (ELLIPSIS if start + shown < len(notation) else "")
        length = min(first + length, start + shown) - max(first, start)
        first = max(first, start) - start + len(before)
        notation = f"{before}{notation[start : start + shown]}{after}"
    return Text.assemble(notation, "\n", " " * first, ("^" * length, style), no_wrap=True, overflow="ignore")
