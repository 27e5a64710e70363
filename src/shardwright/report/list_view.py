"""The view of a list: a column for each of its keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, pretty_count

SHOWN: Mapping[str, Callable[[Any], str]] = {
    "parameters": pretty_count,
    "bytes": pretty_bytes,
    "bf16_flops_per_s": lambda flops: f"{flops / 1e12:,.0f} TFLOP/s",
}
"""How the numbers of a column are shown."""


def list_view(rows: Sequence[Mapping[str, str | int | float]]) -> View:
    """Draws a list. Every row has the same keys."""

    def view(width: int) -> RenderableType:
        names = list(dict.fromkeys(name for row in rows for name in row))
        columns = [
            Column(header=name.replace("_", " "), right=not isinstance(rows[0][name], str), flexible=name != "name")
            for name in names
        ]
        cells = [[Text(SHOWN.get(name, str)(row[name])) for name in names] for row in rows]
        return aligned(columns, [RowGroup(cells=cells)], width)

    return view
