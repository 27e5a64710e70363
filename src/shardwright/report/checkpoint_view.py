"""The views of checkpoints: what they hold, and whether they are damaged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.findings.escaped import escaped_value
from shardwright.report.text.columns import Column, RowGroup, aligned, labelled, paragraph, section
from shardwright.report.text.notation_text import AxisColors
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several
from shardwright.training.changes import Change, recorded


def checkpoint_view(shown: Mapping[str, Any]) -> View:
    """Draws the result of ``checkpoint.describe``: the newest step with its tensors, the others in a line each."""
    shown = escaped_value(shown)

    def view(width: int) -> RenderableType:
        checkpoints = shown["checkpoints"]
        parts: list[RenderableType] = [_newest(one, width) for one in checkpoints[:1]]
        if len(checkpoints) > 1:
            parts.append(section("checkpoints", _steps(shown, width)))
        if "load" in shown:
            parts.append(section("load", *load_lines(shown["load"], shown["load"])))
        parts += _faults(shown["damaged"], shown)
        return Group(*parts)

    return view


def resharded_view(written: Mapping[str, Any]) -> View:
    """Draws the result of ``ckpt reshard``: where it is, and what a load reads before and after."""
    written = escaped_value(written)

    def view(_: int) -> RenderableType:
        before, after = written["before"], written["after"]
        return Group(
            Text(f"resharded to {written['directory']}", style="bold"),
            Text(f"  from  {written['from']}"),
            Text(f"  was   {_read(before)}"),
            *load_lines(written, after),
        )

    return view


def load_lines(plan: Mapping[str, Any], load: Mapping[str, Any]) -> list[RenderableType]:
    """Four lines: the layout, what all devices read and pass on to each other, and what one device reads at most."""
    colors = AxisColors.of(plan["mesh"])
    mesh = Text(" x ").join([colors.axis(axis, f"{axis} {size}") for axis, size in plan["mesh"].items()])
    by_one = f"{load['most_by_a_device']:,} bytes ({pretty_bytes(load['most_by_a_device'])}) at most"
    return [
        Text.assemble("  onto  ", plan["layout"], " on ", mesh, f", {several(plan['devices'], 'device')}"),
        Text(f"  all   {_read(load)}"),
        Text(
            f"  sent  {load['bytes_passed_on']:,} bytes ({pretty_bytes(load['bytes_passed_on'])}) from process to process"
        ),
        Text(f"  each  {by_one}"),
    ]


def _read(load: Mapping[str, Any]) -> str:
    return f"{load['bytes_read']:,} bytes, {load['amplification']:g} times the {load['bytes']:,} of its tensors"


def verified_view(checked: Mapping[str, Any]) -> View:
    """Draws the result of ``checkpoint.verify``: a line for each checkpoint, with its problems below it."""
    checked = escaped_value(checked)

    def view(_: int) -> RenderableType:
        parts: list[RenderableType] = []
        for one in checked["checkpoints"]:
            word = ("intact ", "bold green") if one["ok"] else ("unread ", "bold yellow")
            word = ("damaged", "bold red") if one["damaged"] else word
            read = f"{one['num_boxes']:,} boxes, {pretty_bytes(one['bytes'])}"
            parts.append(Text.assemble(word, f"  {one['directory']}  ", (read, "dim")))
            for problem in one["problems"]:
                parts.append(paragraph(Text.assemble((problem["code"], "bold"), f": {problem['message']}")))
        parts += _faults((), checked)
        if checked["unknown"]:
            parts.append(Text(f"not of a checkpoint, and never read: {', '.join(checked['unknown'])}", style="yellow"))
        return Group(*parts)

    return view


def _newest(one: Mapping[str, Any], width: int) -> RenderableType:
    colors = AxisColors.of(one["mesh"])
    mesh = Text(" x ").join([colors.axis(axis, f"{axis} {size}") for axis, size in one["mesh"].items()])
    lines = [
        ("step", Text(f"{one['step']:,}")),
        ("model", Text(one["model"])),
        ("layout", Text.assemble(one["layout"]["name"], " on ", mesh) if one["mesh"] else Text(one["layout"]["name"])),
        ("seed", Text(str(one["seed"]))),
        ("next row", Text(f"{one['data_position']:,}")),
        ("size", Text(f"{one['bytes']:,} bytes ({pretty_bytes(one['bytes'])}) in {several(one['num_files'], 'file')}")),
    ]
    if one["saved_at"] is not None:
        lines.append(("saved", Text(_time(one["saved_at"]))))
    if one["metrics"]:
        lines.append(("metrics", Text(", ".join(f"{name} {value:.6g}" for name, value in one["metrics"].items()))))
    if changes := recorded(one["metadata"]):
        lines.append(("changes", Text("\n".join(_change(change) for change in changes))))
    return Group(
        Text(one["directory"], style="bold"),
        labelled(lines, width),
        Text(""),
        section("tensors", _tensors(one["tensors"], colors, width)),
    )


def _steps(shown: Mapping[str, Any], width: int) -> RenderableType:
    """A line for each checkpoint: when it was saved, the metric that counts, its bytes, and the rules that keep it."""
    checkpoints, keep = shown["checkpoints"], shown["keep"]
    metric = keep.get("best_of", "loss")
    known = any(metric in one["metrics"] for one in checkpoints)
    columns = [
        Column(header="step", right=True),
        Column(header="saved"),
        *([Column(header=metric, right=True)] * known),
    ]
    columns += [Column(header="bytes", right=True), *([Column(header="kept by", flexible=True)] * bool(keep))]
    columns.append(Column(header="directory"))
    rows = []
    for one in checkpoints:
        cells = [f"{one['step']:,}", "" if one["saved_at"] is None else _time(one["saved_at"])]
        cells += [f"{one['metrics'][metric]:.6g}" if metric in one["metrics"] else ""] * known
        cells += [pretty_bytes(one["bytes"]), *([", ".join(one["kept_by"]) or "none"] * bool(keep))]
        rows.append([Text(cell) for cell in [*cells, PurePath(one["directory"]).name]])
    return aligned(columns, [RowGroup(heading=None, cells=rows)], width)


def _change(change: Change) -> str:
    was, now = (str(value)[:8] if change.name == "data" else f"{value}" for value in (change.was, change.now))
    return f"after step {change.step:,}: {change.name} from {was} to {now}"


def _time(text: str) -> str:
    return text.replace("T", " ").replace("Z", " UTC")


def _tensors(tensors: Sequence[Mapping[str, Any]], colors: AxisColors, width: int) -> RenderableType:
    columns = [Column(header="tensor"), Column(header="shape"), Column(header="dtype")]
    columns += [Column(header="at rest", flexible=True), Column(header="boxes", right=True)]
    columns.append(Column(header="bytes", right=True))
    groups: dict[str, list[list[Text]]] = {}
    for one in tensors:
        group, _, leaf = one["name"].rpartition(".")
        cells = [leaf, "x".join(map(str, one["shape"])) or "1", one["dtype"], colors.spec(one["spec"])]
        cells += [str(one["num_boxes"]), pretty_bytes(one["bytes"])]
        row = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
        groups.setdefault(group or leaf, []).append(row)
    rows = [RowGroup(heading=Text(name, style="bold"), cells=cells) for name, cells in groups.items()]
    return aligned(columns, rows, width)


def _faults(damaged: Sequence[str], shown: Mapping[str, Any]) -> list[RenderableType]:
    parts: list[RenderableType] = [Text.assemble(("damaged", "bold red"), f"  {message}") for message in damaged]
    parts += [Text.assemble(("unread", "bold yellow"), f"  {message}") for message in shown.get("unread", ())]
    deleted = [name for name in shown["under_way"] if ".deleting-" in name]
    saved = [name for name in shown["under_way"] if name not in deleted]
    # A store has no locks.
    known = ", or ended in the last 30 minutes" if "://" in shown["directory"] else ""
    parts += [Text(f"being saved now{known}: {', '.join(saved)}")] if saved else []
    parts += [Text(f"being deleted now: {', '.join(deleted)}")] if deleted else []
    if shown["leftovers"]:
        names = ", ".join(shown["leftovers"])
        parts.append(Text(f"left by a save that did not finish, and never read: {names}", style="yellow"))
    return parts
