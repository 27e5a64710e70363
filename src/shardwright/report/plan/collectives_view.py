"""The table of the collectives of one step."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan, PlannedCollective
from shardwright.report.text.columns import Column, RowGroup, aligned
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.units import pretty_bytes, pretty_seconds

PHASES = ("forward", "recompute", "backward", "update")


def collectives_table(plan: Plan, colors: AxisColors, width: int) -> RenderableType:
    """A line for each component, phase, kind and axes: the largest collective, their number, and their total bytes."""
    if not plan.collectives:
        return Text("  none: the step has no collectives", style="dim")
    timed = any(one.seconds is not None for one in plan.collectives)
    columns = [Column(header="phase"), Column(header="kind"), Column(header="axes", joins=True)]
    columns += [Column(header=name, right=True) for name in ("largest", "times", "all bytes")]
    if timed:
        columns.append(Column(header="all time", right=True))
    groups = []
    for component in COMPONENTS:
        lines: dict[tuple[str, str, tuple[str, ...]], list[PlannedCollective]] = {}
        for one in plan.collectives:
            if one.component == component:
                lines.setdefault((one.phase, one.kind, one.axes), []).append(one)
        if lines:
            ordered = sorted(lines.items(), key=lambda line: PHASES.index(line[0][0]))
            cells = [_line(key, ones, colors, timed) for key, ones in ordered]
            groups.append(RowGroup(heading=Text(component, style="bold"), cells=cells))
    total = sum(one.bytes_per_device * one.count_per_step for one in plan.collectives)
    number = sum(one.count_per_step for one in plan.collectives)
    last = Text(f"  {number:,} collectives of {pretty_bytes(total)} together on a device", style="dim")
    return Group(aligned(columns, groups, width), last)


def _line(
    key: tuple[str, str, tuple[str, ...]], ones: list[PlannedCollective], colors: AxisColors, timed: bool
) -> list[Text]:
    phase, kind, axes = key
    cells = [
        Text(phase),
        Text(kind),
        colors.axes(axes),
        Text(pretty_bytes(max(one.bytes_per_device for one in ones))),
        Text(f"{sum(one.count_per_step for one in ones):,}"),
        Text(pretty_bytes(sum(one.bytes_per_device * one.count_per_step for one in ones))),
    ]
    return [*cells, Text(pretty_seconds(sum(one.seconds or 0 for one in ones)))] if timed else cells
