"""Groups of rows under headings, with the same columns in every group, and lines with labels.

Plans have hundreds of rows, and drawing them here takes a quarter of the time of a table of rich.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.report.text.wrapping import hanging, longest_word, wrapped

GAP = 2
INDENT = 2
NARROWEST = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """``flexible``: this column is narrowed, and its cells wrap between words, where a line is too narrow. ``joins``: where that is
    not enough, its cells go on after those of the column before it.
    """

    header: str
    right: bool = False
    flexible: bool = False
    joins: bool = False


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
    """All groups one under another, below one line of column headers where there are any.

    Where the lines are too narrow, flexible columns wrap. Where that is not enough, each row is a paragraph of its cells with their
    headers. No cell is truncated.
    """
    indent = _indent(groups)
    widths = _narrowed(columns, groups, width - indent - GAP * (len(columns) - 1))
    if widths is None and any(column.joins for column in columns):
        fewer, joined = _joined(columns, groups)
        if _narrowed(fewer, joined, width - indent - GAP * (len(fewer) - 1)) is not None:
            return aligned(fewer, joined, width)
    lines: list[Text] = []
    header = [Text(column.header, style="dim") for column in columns]
    if widths is not None and any(header):
        lines += _row(columns, header, widths, indent)
    for group in groups:
        if group.heading is not None:
            lines += wrapped(Text(" " * INDENT) + group.heading, width)
        for row in group.cells:
            lines += _stacked(columns, row, indent, width) if widths is None else _row(columns, row, widths, indent)
    return Group(*(laid_out(line) for line in lines))


def labelled(lines: Iterable[tuple[str, Text | str]], width: int) -> RenderableType:
    """Texts with a label before each, all as wide. Texts that are empty are left out."""
    shown = [(label, Text(text) if isinstance(text, str) else text) for label, text in lines if text]
    widest = max((len(label) for label, _ in shown), default=0)
    parts = (hanging(Text(" " * INDENT + label.ljust(widest + GAP), style="dim"), text, width) for label, text in shown)
    return Group(*(laid_out(line) for part in parts for line in part))


def paragraph(text: Text | str, style: str = "") -> Text:
    """A text with the indent of rows."""
    return Text(" " * INDENT) + (Text(text, style=style) if isinstance(text, str) else text)


def section(title: str, *parts: RenderableType) -> RenderableType:
    """A title, the parts below it, and an empty line."""
    return Group(Text(title, style="bold"), *parts, Text(""))


def laid_out(line: Text) -> Text:
    line.no_wrap = True
    return line


def _widths(columns: Sequence[Column], groups: Iterable[RowGroup]) -> list[int]:
    widths = [len(column.header) for column in columns]
    for group in groups:
        for row in group.cells:
            for index, cell in enumerate(row):
                widths[index] = max(widths[index], *(len(line) for line in cell.plain.split("\n")))
    return widths


def _narrowed(columns: Sequence[Column], groups: Sequence[RowGroup], room: int) -> list[int] | None:
    """The width of each column, of ``room`` together. None: even with flexible columns as narrow as their words there is not enough."""
    widths = _widths(columns, groups)
    excess = sum(widths) - room
    if excess > 0:
        for index, column in enumerate(columns):
            if column.flexible:
                cells = [row[index] for group in groups for row in group.cells]
                least = max(NARROWEST, len(column.header), *map(longest_word, cells))
                narrower = min(excess, max(0, widths[index] - least))
                widths[index] -= narrower
                excess -= narrower
    return widths if excess <= 0 else None


def _joined(columns: Sequence[Column], groups: Sequence[RowGroup]) -> tuple[list[Column], list[RowGroup]]:
    """The table with each column that joins in the one before it."""
    index = next(n for n, column in enumerate(columns) if column.joins)
    header = f"{columns[index - 1].header} {columns[index].header}".strip()

    def joined(cells: Sequence[Text]) -> list[Text]:
        before, after = cells[index - 1 : index + 1]
        both = Text(" ").join([before, after]) if before and after else before or after
        return [*cells[: index - 1], both, *cells[index + 1 :]]

    rows = [RowGroup(cells=[joined(row) for row in group.cells], heading=group.heading) for group in groups]
    return [*columns[: index - 1], Column(header=header, flexible=True), *columns[index + 1 :]], rows


def _indent(groups: Sequence[RowGroup]) -> int:
    """The indent of rows: larger than that of the headings above them."""
    return INDENT * (2 if any(group.heading is not None for group in groups) else 1)


def _row(columns: Sequence[Column], cells: Sequence[Text], widths: Sequence[int], indent: int) -> list[Text]:
    """The lines of one row."""
    cell_lines = [wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    lines = []
    for number in range(max(map(len, cell_lines))):
        line = Text()
        spaces = indent
        for column, texts, width in zip(columns, cell_lines, widths, strict=True):
            if number < len(texts) and texts[number]:
                text = texts[number]
                line.append(" " * (spaces + (width - len(text) if column.right else 0))).append_text(text)
                spaces = GAP if column.right else GAP + width - len(text)
            else:
                spaces += width + GAP
        lines.append(line)
    return lines


def _stacked(columns: Sequence[Column], cells: Sequence[Text], indent: int, width: int) -> list[Text]:
    """One row as a paragraph: the first cell, then each with its header, as many on a line as fit."""
    lines = [Text(" " * indent)]
    begun = False
    for index, (column, cell) in enumerate(zip(columns, cells, strict=True)):
        for number, text in enumerate(cell.split("\n")):
            if not text:
                continue
            labelled_here = index > 0 and number == 0 and column.header
            piece = Text.assemble((f"{column.header} ", "dim"), text) if labelled_here else text
            if begun and len(lines[-1]) + GAP + len(piece) <= width:
                lines[-1].append(" " * GAP).append_text(piece)
                continue
            start = lines.pop() if not begun else Text(" " * (indent + INDENT))
            lines += hanging(start, piece, width)
            begun = True
    return lines
