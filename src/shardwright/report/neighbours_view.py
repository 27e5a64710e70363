"""The view of what one change of a layout gains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, pretty_seconds

COLUMNS = (
    Column(header="faster", right=True),
    Column(header="change", flexible=True),
    Column(header="step", right=True),
    Column(header="memory", right=True),
)


def neighbours_view(value: Mapping[str, Any]) -> View:
    """Draws the JSON of ``search --like``."""

    def view(width: int) -> RenderableType:
        mesh = " ".join(f"{axis}={size}" for axis, size in value["mesh"].items())
        head = (
            f"{value['model']} on {value['machine']} under {value['layout']} ({mesh}): {pretty_seconds(value['seconds'])}, "
            f"{pretty_bytes(value['bytes_per_device'])} a device"
        )
        rows = [
            [
                Text(f"{row['ratio']:.3g} times"),
                Text(row["change"]),
                Text(pretty_seconds(row["effect"]["seconds"][1])),
                Text(pretty_bytes(row["effect"]["bytes_per_device"][1])),
            ]
            for row in value["changes"]
        ]
        table: RenderableType = (
            aligned(COLUMNS, [RowGroup(cells=rows)], width)
            if rows
            else paragraph("No single change that fits and has no error makes this step faster.")
        )
        return Group(paragraph(head, style="bold"), Text(""), table)

    return view
