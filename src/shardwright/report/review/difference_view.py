"""The view of the differences between two plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.layout.roles import COMPONENTS
from shardwright.locks.difference import CollectiveChange, CompiledDifference, Difference, Side, TensorChange
from shardwright.report.review.answers_view import answers_section
from shardwright.report.text.columns import Column, RowGroup, aligned, section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several

NOTHING = "-"
UNKNOWN = "component unknown: the compiler did not keep it"
REMOVED, ADDED = "red", "green"
MOST_FIELDS = 10
"""The most lines of fields that differ: `--json` has them all."""


def difference_view(found: Difference, names: tuple[str, str] = ("A", "B"), notes: tuple[str, str] = ("", "")) -> View:
    """Draws a difference: the two sides by their names, tensors, collectives, memory, and the compiled programs. ``notes``: on each side."""

    def view(width: int) -> RenderableType:
        before = AxisColors.of(found.before.mesh)
        colors = AxisColors.of({**dict.fromkeys(before.styles, 2), **found.before.mesh, **_larger(found)})
        parts = [_head(found, names, colors, notes)]
        if any(found.answers):
            parts.append(answers_section(found.answers, names, width, alike=found.alike))
        number = len(found.tensors) + found.num_unchanged
        if not found.moved:
            parts.append(Text(f"Nothing moves: {number} tensors and all collectives are the same."))
            return Group(*parts, *_fields(found))
        for kind in ("weight", "activation"):
            changes = [change for change in found.tensors if change.kind == kind]
            if changes:
                title = f"{kind}s that differ: {len(changes)}; bytes per layer and device"
                parts.append(section(title, _tensors(changes, names, colors, width)))
        parts.append(Text(f"{found.num_unchanged} of {number} tensors are the same on both sides.\n", style="dim"))
        if found.collectives:
            title = "collectives that differ; bytes and times a step, per device"
            parts.append(section(title, _collectives(found, names, colors, width)))
        parts += _fields(found)
        parts.append(section("memory of one device", _memory(found.memory, names, width)))
        if found.compiled is not None:
            parts += _compiled(found.compiled, names, colors, width)
        return Group(*parts)

    return view


def _fields(found: Difference) -> list[RenderableType]:
    """The fields that differ and are in no table."""
    changes = found.reported_fields
    more = [f"  and {len(changes) - MOST_FIELDS} more"] if len(changes) > MOST_FIELDS else []
    lines = [*(f"  {change.text}" for change in changes[:MOST_FIELDS]), *more]
    return [section(f"fields that differ: {len(changes)}", Text("\n".join(lines)))] if changes else []


def _compiled(
    found: CompiledDifference, names: tuple[str, str], colors: AxisColors, width: int
) -> list[RenderableType]:
    """The differences between the compiled programs."""
    targets = dict.fromkeys(found.target)
    if not found.moved:
        return [Text(f"compiled for {found.target[0]}: the same collectives and memory.\n", style="dim")]
    parts: list[RenderableType] = []
    if found.collectives:
        title = f"compiled for {', then '.join(targets)}: collectives that differ"
        parts.append(section(title, _collectives(found, names, colors, width)))
    title = f"compiled for {', then '.join(targets)}: memory of one device"
    parts.append(section(title, _memory(found.memory, names, width)))
    versions = [" ".join(f"{name} {version}" for name, version in side.items()) for side in found.versions]
    if versions[0] != versions[1]:
        parts.append(
            Text(f"{names[0]} was compiled with {versions[0]}, {names[1]} with {versions[1]}.\n", style="yellow")
        )
    return parts


def _larger(found: Difference) -> dict[str, int]:
    """The mesh axes with their larger size of both sides: an axis has a colour when it is larger than 1 on either."""
    meshes = (found.before.mesh, found.after.mesh)
    return {axis: max(mesh.get(axis, 1) for mesh in meshes) for mesh in meshes for axis in mesh}


def _head(found: Difference, names: tuple[str, str], colors: AxisColors, of_sides: tuple[str, str]) -> RenderableType:
    notes = []
    first, second = names
    sizes = [_devices(side) for side in (found.before, found.after)]
    if sizes[0] != sizes[1]:
        notes.append(
            f"{first} has {sizes[0]} devices, {second} {sizes[1]}: bytes per device are not directly comparable."
        )
    elif found.mesh_moved and _larger_than_one(found.before) == _larger_than_one(found.after):
        notes.append("The mesh axes have another order or other links: the same shards are on other devices.")
    rows = {row["key"]: row for side in found.training_only for row in side}
    notes += [f"Training here lacks {row['part']} ('{row['key']}': {row['value']})." for row in rows.values()]
    for name, side in zip(names, (found.before, found.after), strict=True):
        if side.errors:
            notes.append(f"{name} has findings of severity error ({side.errors}): `shardwright plan` shows them.")
    indent = max(len(name) for name in names) + 2
    sides = (
        _side(first.ljust(indent), found.before, colors, REMOVED, of_sides[0]),
        _side(second.ljust(indent), found.after, colors, ADDED, of_sides[1]),
    )
    return Group(*sides, *(Text(note, style="yellow") for note in notes), Text(""))


def _side(name: str, side: Side, colors: AxisColors, style: str, note: str) -> Text:
    mesh = Text(" x ").join([colors.axis(axis, f"{axis} {size}") for axis, size in side.mesh.items()])
    what = Text.assemble((side.model, "bold"), " under ", (side.layout, "bold"))
    step = f"{several(side.batch, 'row')} of {several(side.length, 'token')}, {side.engine}"
    indent = "\n" + " " * len(name)
    return Text.assemble((name, style), what, indent, mesh, f"; {step}", f"{indent}{note}" if note else "")


def _larger_than_one(side: Side) -> dict[str, int]:
    return {axis: size for axis, size in side.mesh.items() if size != 1}


def _devices(side: Side) -> int:
    number = 1
    for size in side.mesh.values():
        number *= size
    return number


def _tensors(changes: Sequence[TensorChange], names: tuple[str, str], colors: AxisColors, width: int) -> RenderableType:
    both = Column(header=f"{names[0]}, then {names[1]}", flexible=True)
    columns = [Column(header="tensor"), both, Column(header="bytes", right=True)]
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
        rows.append(RowGroup(heading=heading, cells=[row for change in group for row in _tensor(change, colors)]))
    return aligned(columns, rows, width)


def _tensor(change: TensorChange, colors: AxisColors) -> list[list[Text]]:
    """A line before and a line after for each field that differs. The first pair has the bytes."""
    rows: list[list[Text]] = []
    leaf = change.name.rpartition(".")[2]
    specs = [("at rest", change.at_rest), ("in use", change.in_use)]
    if change.in_update != (None, None):
        before, after = (updated or at_rest for updated, at_rest in zip(change.in_update, change.at_rest, strict=True))
        specs.append(("in update", (before, after)))
    others = [("dtype", change.dtype), ("shape", change.shape)] if change.change == "moved" else []
    shown = [(label, pair) for label, pair in (*specs, *others) if pair[0] != pair[1]]
    if not shown and change.bytes_per_device[0] == change.bytes_per_device[1] and change.gradient[0]:
        # Another placement implies another reduction, so the reduction is only shown where it is the only difference.
        shown = [("gradient", change.gradient)]
    if not shown:
        shown = [next((label, pair) for label, pair in specs if pair != (None, None))]
    for number, (label, pair) in enumerate(shown):
        for sign, style, text, num_bytes in zip("-+", (REMOVED, ADDED), pair, change.bytes_per_device, strict=True):
            name = leaf if number == 0 and sign == "-" else ""
            where = Text(label if sign == "-" else "", style="dim")
            shown_text = colors.spec(text or "") if (label, pair) in specs else Text(text or "")
            text = Text.assemble((f"{sign} ", style), shown_text if text is not None else NOTHING)
            size = pretty_bytes(num_bytes) if num_bytes is not None and number == 0 else ""
            emphasis = "" if change.bytes_per_device[0] == change.bytes_per_device[1] else "bold"
            row = [Text(name), where, text, Text(size, style=emphasis)]
            rows.append(row if change.kind == "weight" else [row[0], *row[2:]])
    return rows


def _collectives(
    found: Difference | CompiledDifference, names: tuple[str, str], colors: AxisColors, width: int
) -> RenderableType:
    columns = [Column(header="phase"), Column(header="kind"), Column(header="axes", joins=True)]
    columns += [Column(header=name, right=True) for name in (names[0], "times", names[1], "times")]
    groups = []
    for component in (*COMPONENTS, None):
        lines = [change for change in found.collectives if change.component == component]
        if lines:
            heading = Text(component or UNKNOWN, style="bold")
            groups.append(RowGroup(heading=heading, cells=[_collective(change, colors) for change in lines]))
    before, after = found.bytes_per_step
    cells = [Text("all collectives"), Text(""), Text(""), Text(pretty_bytes(before)), Text("")]
    cells += [Text(pretty_bytes(after)), Text(_ratio(before, after))]
    return aligned(columns, [*groups, RowGroup(heading=Text(""), cells=[cells])], width)


def _collective(change: CollectiveChange, colors: AxisColors) -> list[Text]:
    kind = f"ragged {change.kind}" if change.ragged else change.kind
    cells = [Text(change.phase or NOTHING), Text(kind), colors.axes(change.axes)]
    for num_bytes, count, style in zip(change.bytes_per_step, change.count_per_step, (REMOVED, ADDED), strict=True):
        cells.append(Text(pretty_bytes(num_bytes) if count else NOTHING, style=style))
        cells.append(Text(f"x{count}" if count else ""))
    return cells


def _memory(memory: Mapping[str, tuple[int, int]], names: tuple[str, str], width: int) -> RenderableType:
    columns = [Column(header="part")]
    columns += [Column(header=name, right=True) for name in (*names, "", "")]
    cells = []
    for part, (before, after) in memory.items():
        name = part.removesuffix("_bytes_per_device").removesuffix("_bytes")
        change = "" if before == after else f"{'+' if after > before else '-'}{pretty_bytes(abs(after - before))}"
        row = [Text(name), Text(f"{before:,}"), Text(f"{after:,}"), Text(change), Text(_ratio(before, after))]
        cells.append(row)
    return aligned(columns, [RowGroup(cells=cells)], width)


def _ratio(before: int, after: int) -> str:
    if before == after:
        return "same"
    return f"x{after / before:.2f}" if before else ""
