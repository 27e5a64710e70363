"""Groups of rows under headings, with the same columns in every group.

Plans have hundreds of rows, and drawing them here takes a quarter of the time of a table of rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

GAP = 2
INDENT = 2
NARROWEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """``flexible``: this column is narrowed, and its cells wrap, where a line is too narrow."""

    header: str
    right: bool = False
    flexible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowGroup:
    """Rows of cells under a heading. None: no line for a heading."""

    cells: Sequence[Sequence[Text]]
    heading: Text | None = None


def natural_width(columns: Sequence[Column], groups: Iterable[RowGroup]) -> int:
    """The width at which nothing wraps."""
    groups = list(groups)
    return _indent(groups) + sum(_widths(columns, groups)) + GAP * (len(columns) - 1)


def aligned(columns: Sequence[Column], groups: Sequence[RowGroup], width: int) -> RenderableType:
    """All groups one under another, below one line of column headers where there are any."""
    widths = _widths(columns, groups)
    indent = _indent(groups)
    excess = indent + sum(widths) + GAP * (len(columns) - 1) - width
    if excess > 0:
        index = next((n for n, column in enumerate(columns) if column.flexible), 0)
        widths[index] = max(NARROWEST, widths[index] - excess)
    header = [Text(column.header, style="dim") for column in columns]
    lines = _row(columns, header, widths, indent) if any(header) else []
    for group in groups:
        if group.heading is not None:
            lines.append(Text(" " * INDENT) + group.heading)
        for row in group.cells:
            lines += _row(columns, row, widths, indent)
    return Group(*lines)


def section(title: str, *parts: RenderableType) -> RenderableType:
    """A title, the parts below it, and an empty line."""
    return Group(Text(title, style="bold"), *parts, Text(""))


def _widths(columns: Sequence[Column], groups: Iterable[RowGroup]) -> list[int]:
    widths = [len(column.header) for column in columns]
    for group in groups:
        for row in group.cells:
            for index, cell in enumerate(row):
                widths[index] = max(widths[index], *(len(line) for line in cell.plain.split("\n")))
    return widths


def _indent(groups: Sequence[RowGroup]) -> int:
    """The indent of rows: larger than that of the headings above them."""
    return INDENT * (2 if any(group.heading is not None for group in groups) else 1)


def _row(columns: Sequence[Column], cells: Sequence[Text], widths: Sequence[int], indent: int) -> list[Text]:
    """The lines of one row."""
    wrapped = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(len(cell_lines) for cell_lines in wrapped)):
        line = Text(no_wrap=True, overflow="ignore")
        spaces = indent
        for column, cell_lines, width in zip(columns, wrapped, widths, strict=True):
            if number < len(cell_lines) and cell_lines[number]:
                text = cell_lines[number]
                line.append(" " * (spaces + (width - len(text) if column.right else 0))).append_text(text)
                spaces = GAP if column.right else GAP + width - len(text)
            else:
                spaces += width + GAP
        lines.append(line)
    return lines


def _wrapped(cell: Text, width: int) -> list[Text]:
    """The cell's own lines. Each is broken between words where it is too long, or after a slash."""
    lines: list[Text] = []
    for line in cell.split("\n", allow_blank=True):
        breaks, start = [], 0
        while len(line.plain) - start > width:
            space = line.plain.rfind(" ", start, start + width + 1)
            slash = line.plain.rfind("/", start, start + width)
            start = space + 1 if space > start else slash + 1 if slash > start else start + width
            breaks.append(start)
        for text in line.divide(breaks) if breaks else [line]:
            text.rstrip()
            lines.append(text)
    return lines
