"""Bytes on one device, as numbers and as bars."""

from __future__ import annotations

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.plan.plan import Plan
from shardwright.report.text.columns import GAP, INDENT, Column, RowGroup, aligned
from shardwright.report.text.units import pretty_bytes

BAR_WIDTH = 30
"""The longest bar, if the line is wide enough."""
BAR = "#"


def memory_table(plan: Plan, width: int) -> RenderableType:
    """Each item exact to the byte, except activations, which are an estimate. With chips, a full bar is a chip's usable memory."""
    memory, chip = plan.memory, plan.request.chip
    total = memory.total_bytes_per_device
    full = max(total, chip.usable_bytes) if chip else max(1, total)
    items = [
        ("weights", memory.weights_bytes, ""),
        ("gradients", memory.gradients_bytes, ""),
        ("optimizer", memory.optimizer_bytes, ""),
        *([("average", memory.average_bytes, "")] if memory.average_bytes else []),
        *([("amax histories", memory.amax_history_bytes, "")] if memory.amax_history_bytes else []),
        ("activations, estimated", memory.activations_bytes, ""),
        ("total", total, ""),
    ]
    if chip:
        items.append((f"{chip.name} has", chip.usable_bytes, f"the total is {total / chip.usable_bytes:.1%} of it"))
    items.append(("saved", memory.saved_bytes, "in a checkpoint"))
    columns = [Column(header="part"), Column(header="bytes", right=True), Column(header="", right=True)]
    columns.append(Column(header="", flexible=True))
    used = INDENT + sum(
        GAP + max(len(text) for text in texts)
        for texts in zip(*((name, f"{number:,}", pretty_bytes(number)) for name, number, _ in items), strict=True)
    )
    longest = max(1, min(BAR_WIDTH, width - used))
    cells = []
    for name, number, note in items:
        style = "bold" if name == "total" else ""
        bar = Text(note, style="dim") if note else Text(BAR * round(longest * number / full), style="cyan")
        cells.append([Text(name, style=style), Text(f"{number:,}", style=style), Text(pretty_bytes(number)), bar])
    return aligned(columns, [RowGroup(cells=cells)], width)
