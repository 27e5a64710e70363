"""The view of one tensor of a plan: its placement, and what decided it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.why import AxisReason
from shardwright.report.text.columns import Column, RowGroup, aligned, labelled, section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes


def why_view(plan: Plan, tensor: TensorPlan, why: Sequence[AxisReason]) -> View:
    """Draws the tensor and a line for each axis larger than 1."""

    def view(width: int) -> RenderableType:
        colors = AxisColors.of(plan.mesh.shape)
        request = plan.request
        title = Text.assemble((tensor.name, "bold"), f" of {request.table.name} under {request.layout.name}")
        times = f", of each of {tensor.num} layers" if tensor.num > 1 else ""
        gradient = ", ".join(f"{how} over {axis}" for axis, how in tensor.gradient.items() if plan.mesh.size(axis) > 1)
        lines: list[tuple[str, Text | str]] = [
            ("shape", f"{'x'.join(map(str, tensor.shape))} {tensor.dtype}{times}"),
            ("at rest", "" if tensor.at_rest is None else colors.spec(str(tensor.at_rest))),
            ("in use", colors.spec(str(tensor.in_use))),
            ("gradient", gradient),
            ("a device", pretty_bytes(tensor.bytes_per_device)),
        ]
        columns = [Column(header=name) for name in ("axis", "role", "shards")]
        columns += [Column(header="why", flexible=True), Column(header="where")]
        cells = [
            [
                colors.axis(reason.axis, f"{reason.axis} {reason.size}"),
                Text(reason.role),
                Text(reason.dim or "-"),
                Text(reason.why),
                Text("" if reason.position is None else str(reason.position)),
            ]
            for reason in why
        ]
        return Group(
            title, labelled(lines, width), Text(""), section("axes", aligned(columns, [RowGroup(cells=cells)], width))
        )

    return view
