"""The communication that a compiled program's schedule leaves exposed, by component, and what the plan expects."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.compiled.reading.program import Exposure
from shardwright.core.plan.plan import Plan
from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph
from shardwright.report.text.units import pretty_bytes, pretty_seconds


def exposure_table(plan: Plan, exposures: Sequence[Exposure], width: int) -> RenderableType:
    """Bytes of one device in a step: all, and those of collectives without a product between start and done."""
    columns = [Column(header="component"), *(Column(header=name, right=True) for name in ("moved", "exposed", "share"))]
    rows = [
        [
            Text(one.component or "without a name"),
            Text(pretty_bytes(one.moved_bytes)),
            Text(pretty_bytes(one.exposed_bytes) if one.exposed_bytes else "-"),
            Text(f"{one.share:.1%}"),
        ]
        for one in exposures
    ]
    moved = sum(one.moved_bytes for one in exposures)
    share = sum(one.exposed_bytes for one in exposures) / moved
    text = f"{share:.1%} of all bytes have no product between the start and the done of their collective"
    if plan.step is not None and plan.step.communication_seconds:
        step = plan.step
        text += (
            f"; the plan expects {pretty_seconds(step.exposed_seconds)} of {pretty_seconds(step.communication_seconds)}, "
            f"{step.exposed_seconds / step.communication_seconds:.1%} of the time of its collectives, to be exposed"
        )
    return Group(aligned(columns, [RowGroup(cells=rows)], width), Text(""), paragraph(text, "dim"))
