"""The table of roles: the role of every axis in every component."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan
from shardwright.report.text.columns import Column, RowGroup, aligned, natural_width
from shardwright.report.text.notation_text import DIM, AxisColors


def roles_table(plan: Plan, colors: AxisColors, width: int) -> RenderableType:
    """A row per axis and a column per component; where that is too wide, transposed."""
    layout, present = plan.request.layout, plan.request.table.components
    components = [name for name in COMPONENTS if name in present]
    rows = [[Text(""), *(Text(name, style="dim") for name in components)]]
    for axis, size in plan.mesh.shape.items():
        row = [colors.axis(axis, f"{axis} {size}")]
        for component in components:
            role = layout.role(axis, component)
            row.append(Text(role, style=DIM) if role == "idle" else colors.axis(axis, role))
        rows.append(row)
    if natural_width([Column(header="")] * len(rows[0]), [RowGroup(cells=rows)]) > width:
        rows = [list(column) for column in zip(*rows, strict=True)]
    return aligned([Column(header="")] * len(rows[0]), [RowGroup(cells=rows)], width)
