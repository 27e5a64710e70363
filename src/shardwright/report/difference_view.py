"""What moved between two plans, as people look at it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.difference import CollectiveChange, Difference, Side, TensorChange
from shardwright.core.roles import COMPONENTS
from shardwright.report.columns import Column, Rows, aligned, section
from shardwright.report.notation_text import AxisColors
from shardwright.report.terminal import View
from shardwright.report.units import pretty_bytes, several

NOTHING = "-"
REMOVED, ADDED = "red", "green"


def difference_view(found: Difference) -> View:
    """Draws a difference: the two sides, tensors, collectives, memory."""

    def view(width: int) -> RenderableType:
        before = AxisColors.of(found.before.mesh)
        colors = AxisColors.of({**dict.fromkeys(before.styles, 2), **found.before.mesh, **_larger(found)})
        parts = [_head(found, colors)]
        number = len(found.tensors) + found.num_unchanged
        if not found.tensors and not found.collectives:
            return Group(*parts, Text(f"Nothing moves: {number} tensors and all collectives are the same."))
        for kind in ("weight", "activation"):
            changes = [change for change in found.tensors if change.kind == kind]
            if changes:
                title = f"{kind}s that differ: {len(changes)}; bytes per layer and device"
                parts.append(section(title, _tensors(changes, colors, width)))
        parts.append(Text(f"{found.num_unchanged} of {number} tensors are the same on both sides.\n", style="dim"))
        if found.collectives:
            title = "collectives that differ; bytes and times a step, per device"
            parts.append(section(title, _collectives(found, colors, width)))
        parts.append(section("memory of one device", _memory(found, width)))
        return Group(*parts)

    return view


def _larger(found: Difference) -> dict[str, int]:
    """An axis has a colour when it is larger than 1 on either side."""
    meshes = (found.before.mesh, found.after.mesh)
    return {axis: max(mesh.get(axis, 1) for mesh in meshes) for mesh in meshes for axis in mesh}


def _head(found: Difference, colors: AxisColors) -> RenderableType:
    notes = []
    sizes = [_devices(side) for side in (found.before, found.after)]
    if sizes[0] != sizes[1]:
        notes.append(f"A has {sizes[0]} devices, B {sizes[1]}: bytes on a device are not of equal shares.")
    for name, side in (("A", found.before), ("B", found.after)):
        if side.errors:
            notes.append(f"{name} has findings of severity error ({side.errors}): `shardwright plan` shows them.")
    sides = (_side("A", found.before, colors, REMOVED), _side("B", found.after, colors, ADDED))
    return Group(*sides, *(Text(note, style="yellow") for note in notes), Text(""))


def _side(name: str, side: Side, colors: AxisColors, style: str) -> Text:
    mesh = Text(" x ").join([colors.axis(axis, f"{axis} {size}") for axis, size in side.mesh.items()])
    what = Text.assemble((side.model, "bold"), " under ", (side.layout, "bold"))
    step = f"{several(side.batch, 'row')} of {several(side.length, 'token')}, {side.engine}"
    return Text.assemble((f"{name}  ", style), what, "\n   ", mesh, f"; {step}")


def _devices(side: Side) -> int:
    number = 1
    for size in side.mesh.values():
        number *= size
    return number


def _tensors(changes: Sequence[TensorChange], colors: AxisColors, width: int) -> RenderableType:
    columns = [Column(header="tensor"), Column(header="A, then B", flexible=True), Column(header="bytes", right=True)]
    if changes[0].kind == "weight":
        columns.insert(1, Column(header="when"))
    groups: dict[str, list[TensorChange]] = {}
    for change in changes:
        groups.setdefault(change.name.rpartition(".")[0] or change.component, []).append(change)
    ordered = sorted(groups.items(), key=lambda group: COMPONENTS.index(group[1][0].component))
    rows = []
    for name, group in ordered:
        times = f" x{group[0].num}" if group[0].num > 1 else ""
        heading = Text.assemble((name, "bold"), times)
        rows.append(Rows(heading=heading, cells=[row for change in group for row in _tensor(change, colors)]))
    return aligned(columns, rows, width)


def _tensor(change: TensorChange, colors: AxisColors) -> list[list[Text]]:
    """Lines before and after; at rest and in use apart where both differ or where bytes need a line."""
    rows: list[list[Text]] = []
    leaf = change.name.rpartition(".")[2]
    pairs = [("at rest", change.at_rest), ("in use", change.in_use)]
    shown = [(label, pair) for label, pair in pairs if pair[0] != pair[1]]
    if not shown:
        shown = [next((label, pair) for label, pair in pairs if pair != (None, None))]
    for number, (label, pair) in enumerate(shown):
        for sign, style, spec, num_bytes in zip("-+", (REMOVED, ADDED), pair, change.bytes_per_device, strict=True):
            name = leaf if number == 0 and sign == "-" else ""
            where = Text(label if sign == "-" else "", style="dim")
            text = Text.assemble((f"{sign} ", style), colors.spec(spec) if spec is not None else NOTHING)
            # Bytes are those of what the plan counts: at rest for a weight, in use for an activation.
            counted = label == "at rest" or change.kind == "activation" or len(shown) == 1
            size = pretty_bytes(num_bytes) if num_bytes is not None and counted else ""
            emphasis = "" if change.bytes_per_device[0] == change.bytes_per_device[1] else "bold"
            row = [Text(name), where, text, Text(size, style=emphasis)]
            rows.append(row if change.kind == "weight" else [row[0], *row[2:]])
    return rows


def _collectives(found: Difference, colors: AxisColors, width: int) -> RenderableType:
    columns = [Column(header="phase"), Column(header="kind"), Column(header="axes", flexible=True)]
    columns += [Column(header=name, right=True) for name in ("A", "times", "B", "times")]
    groups = []
    for component in COMPONENTS:
        lines = [change for change in found.collectives if change.component == component]
        if lines:
            heading = Text(component, style="bold")
            groups.append(Rows(heading=heading, cells=[_collective(change, colors) for change in lines]))
    before, after = found.bytes_per_step
    cells = [Text("all collectives"), Text(""), Text(""), Text(pretty_bytes(before)), Text("")]
    cells += [Text(pretty_bytes(after)), Text(_ratio(before, after))]
    return aligned(columns, [*groups, Rows(heading=Text(""), cells=[cells])], width)


def _collective(change: CollectiveChange, colors: AxisColors) -> list[Text]:
    cells = [Text(change.phase), Text(change.kind), colors.axes(change.axes)]
    for num_bytes, count, style in zip(change.bytes_per_step, change.count_per_step, (REMOVED, ADDED), strict=True):
        cells.append(Text(pretty_bytes(num_bytes) if count else NOTHING, style=style))
        cells.append(Text(f"x{count}" if count else ""))
    return cells


def _memory(found: Difference, width: int) -> RenderableType:
    columns = [Column(header="part")]
    columns += [Column(header=name, right=True) for name in ("A", "B", "", "")]
    cells = []
    for part, (before, after) in found.memory.items():
        name = part.removesuffix("_bytes_per_device").removesuffix("_bytes")
        change = "" if before == after else f"{'+' if after > before else '-'}{pretty_bytes(abs(after - before))}"
        row = [Text(name), Text(f"{before:,}"), Text(f"{after:,}"), Text(change), Text(_ratio(before, after))]
        cells.append(row)
    return aligned(columns, [Rows(cells=cells)], width)


def _ratio(before: int, after: int) -> str:
    if before == after:
        return "same"
    return f"x{after / before:.2f}" if before else ""
