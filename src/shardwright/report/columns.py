"""Groups of rows under headings, with the same columns in every group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

GAP = 2
INDENT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """``flexible``: this column gives way, and wraps, where a line is too narrow."""

    header: str
    right: bool = False
    flexible: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows of cells under a heading; a heading of None leaves its line out."""

    cells: Sequence[Sequence[Text]]
    heading: Text | None = None


def natural_width(columns: Sequence[Column], groups: Iterable[Rows]) -> int:
    """The width at which nothing wraps."""
    return INDENT + sum(_widths(columns, list(groups))) + GAP * (len(columns) - 1)


def aligned(columns: Sequence[Column], groups: Sequence[Rows], width: int) -> RenderableType:
    """All groups one under another, below one line of column headers."""
    widths = _widths(columns, groups)
    excess = INDENT + sum(widths) + GAP * (len(columns) - 1) - width
    if excess > 0:
        index = next((n for n, column in enumerate(columns) if column.flexible), 0)
        widths[index] = max(12, widths[index] - excess)
    header = [Text(column.header, style="dim") for column in columns]
    parts: list[RenderableType] = [_grid(columns, [header], widths)] if any(header) else []
    for group in groups:
        if group.heading is not None:
            parts.append(group.heading)
        parts.append(_grid(columns, group.cells, widths))
    return Group(*parts)


def section(title: str, *parts: RenderableType) -> RenderableType:
    """A title, what stands below it, and an empty line."""
    return Group(Text(title, style="bold"), *parts, Text(""))


def _grid(columns: Sequence[Column], rows: Iterable[Sequence[Text]], widths: Sequence[int]) -> RenderableType:
    grid = Table.grid(padding=(0, GAP, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(width=width, justify="right" if column.right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return Padding(grid, (0, 0, 0, INDENT))


def _widths(columns: Sequence[Column], groups: Iterable[Rows]) -> list[int]:
    widths = [len(column.header) for column in columns]
    for group in groups:
        for row in group.cells:
            for index, cell in enumerate(row):
                widths[index] = max(widths[index], *(line.cell_len for line in cell.split(allow_blank=True)), 0)
    return widths
