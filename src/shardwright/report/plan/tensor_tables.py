"""The tables of the tensors of a plan: weights with their gradient reductions, and activations, both grouped by module."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.text import Text

from shardwright.core.layout.roles import COMPONENTS
from shardwright.core.plan.plan import Plan, TensorPlan, layers_on_device
from shardwright.core.resolution.request import FLOATS
from shardwright.report.text.columns import Column, RowGroup, aligned, natural_width
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.units import pretty_bytes

ARROW = "-> "


def weights_table(plan: Plan, colors: AxisColors, width: int) -> RenderableType:
    """Name, shape, specs at rest and in use (and in the update, where that is another), bytes of one on a device, and the reductions of
    its gradient.

    The widest form that fits is used: all on one line; in use below at rest; the gradient below both.
    """
    larger = plan.mesh.larger_than_one(plan.mesh.names)
    for form in ("one line", "two lines", "three lines"):
        columns = [Column(header="weight"), Column(header="shape")]
        specs = "at rest -> in use" if form == "one line" else "at rest, then in use"
        columns += [Column(header=specs, flexible=True), Column(header="bytes", right=True)]
        if form != "three lines":
            columns.append(Column(header="gradient"))
        groups = [
            RowGroup(
                heading=_heading(plan, name, rows), cells=[_weight(row, rows, colors, larger, form) for row in rows]
            )
            for name, rows in grouped(plan.weights)
        ]
        if natural_width(columns, groups) <= width or form == "three lines":
            return aligned(columns, groups, width)
    raise AssertionError(width)


def activations_table(plan: Plan, colors: AxisColors, width: int) -> RenderableType:
    """Name, shape, spec and bytes of one on a device, for the activations with a floating-point dtype."""
    columns = [Column(header="activation"), Column(header="shape"), Column(header="in use", flexible=True)]
    columns.append(Column(header="bytes", right=True))
    groups = [
        RowGroup(
            heading=_heading(plan, name, rows),
            cells=[
                [_leaf(row, rows), _shape(row), colors.spec(str(row.in_use)), Text(pretty_bytes(row.bytes_per_device))]
                for row in rows
            ],
        )
        for name, rows in grouped(row for row in plan.activations if row.dtype in FLOATS)
    ]
    return aligned(columns, groups, width)


def of_integers(plan: Plan) -> tuple[TensorPlan, ...]:
    """The activations that no table shows: those of integers, as token ids, positions and expert assignments: a few bytes each."""
    return tuple(row for row in plan.activations if row.dtype not in FLOATS)


def grouped(tensors: Iterable[TensorPlan]) -> list[tuple[str, list[TensorPlan]]]:
    """Groups of tensors whose names differ only in the last word, in the order of the forward pass."""
    groups: dict[str, list[TensorPlan]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.name.rpartition(".")[0] or tensor.component, []).append(tensor)
    return sorted(groups.items(), key=lambda group: COMPONENTS.index(group[1][0].component))


def _heading(plan: Plan, name: str, rows: Sequence[TensorPlan]) -> Text:
    """The name of a group, its number of layers, and the bytes of all its tensors on a device."""
    component = rows[0].component
    heading = Text.assemble((name, "bold"))
    if _shared_num(rows):
        heading.append(f" x{rows[0].num}")
    if component not in name.split("."):
        heading.append(f" ({component})", style="dim")
    if rows[0].kind == "weight":
        total = sum(row.bytes_per_device * layers_on_device(plan.request, plan.mesh, row) for row in rows)
        heading.append(f"  {pretty_bytes(total)} at rest", style="dim")
    return heading


def _weight(
    row: TensorPlan, rows: Sequence[TensorPlan], colors: AxisColors, larger: Sequence[str], form: str
) -> list[Text]:
    assert row.at_rest is not None
    at_rest, in_use = colors.spec(str(row.at_rest)), colors.spec(str(row.in_use))
    gradient = _gradient(row, colors, larger)
    # Axes of size 1 are left out of both.
    same = at_rest.plain == in_use.plain
    lines = [at_rest] if same else [at_rest, Text.assemble(ARROW, in_use)]
    in_update = colors.spec(str(row.updated))
    if in_update.plain != at_rest.plain:
        lines.append(Text.assemble(("update: ", "dim"), in_update))
    if form == "three lines" and gradient:
        lines.append(Text.assemble(("grad: ", "dim"), gradient))
    specs = Text(" " if form == "one line" else "\n").join(lines)
    cells = [_leaf(row, rows), _shape(row), specs, Text(pretty_bytes(row.bytes_per_device))]
    return cells if form == "three lines" else [*cells, gradient]


def _gradient(row: TensorPlan, colors: AxisColors, larger: Sequence[str]) -> Text:
    """The reductions over axes larger than 1, with the axes of one kind joined."""
    reductions = []
    for kind in ("reduce-scatter", "all-reduce"):
        axes = [axis for axis in larger if row.gradient.get(axis) == kind]
        if axes:
            reductions.append(Text.assemble(f"{kind} ", colors.axes(axes)))
    return Text(", ").join(reductions)


def _shared_num(rows: Sequence[TensorPlan]) -> bool:
    """Whether all rows have the same number of layers, more than one: the heading then has it."""
    return rows[0].num > 1 and len({row.num for row in rows}) == 1


def _leaf(row: TensorPlan, rows: Sequence[TensorPlan]) -> Text:
    name = Text(row.name.rpartition(".")[2])
    return name if row.num == 1 or _shared_num(rows) else name.append(f" x{row.num}", style="dim")


def _shape(row: TensorPlan) -> Text:
    return Text("x".join(map(str, row.shape)) or "1")
