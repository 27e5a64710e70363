"""The view of a search: a table of its answers, their commands, and what ended all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.findings.codes import CODES, TOO_LARGE
from shardwright.core.layout.wording import percent
from shardwright.report.search_compiled_view import compile_notes, compiled_table
from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph, section
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, pretty_seconds, rounded, several

COLUMNS = (
    Column(header="rank", right=True),
    Column(header="layout", flexible=True),
    Column(header="mesh", flexible=True),
    Column(header="step", right=True),
    Column(header="tokens/s a device", right=True, flexible=True),
    Column(header="MFU", right=True),
    Column(header="memory", right=True),
    Column(header="between domains", right=True, flexible=True),
    Column(header="loses most by", flexible=True),
)


def search_view(value: Mapping[str, Any], file: Path | None) -> View:
    """Draws the result of a search from its JSON."""
    answers = value["answers"]

    def view(width: int) -> RenderableType:
        parts: list[RenderableType] = [Text(_head(value), style="bold"), Text("")]
        if answers:
            parts += [aligned(COLUMNS, [RowGroup(cells=[_cells(answer, answers) for answer in answers])], width)]
            if any(answer.get("compiled") for answer in answers):
                parts += [section("predicted and compiled, of one device and step", compiled_table(value, width))]
            parts += [Text(""), *(paragraph(line) for line in _commands(answers, file)), Text("")]
        parts += [paragraph(line, style="dim") for line in _notes(value)]
        return Group(*parts)

    return view


def _head(value: Mapping[str, Any]) -> str:
    return (
        f"{value['model']} on {value['machine']}: {several(value['layouts'], 'layout')}, {value['priced']:,} priced in "
        f"{pretty_seconds(value['seconds'])}"
    )


def _cells(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Text]:
    answer, loss = row["answer"], row["loses"]
    equal = sum(other["rank"] == row["rank"] for other in rows) > 1
    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items() if size > 1) or "one device"
    return [
        Text(f"{row['rank']}{'=' if equal else ''}"),
        Text(row["layout"], style="bold" if row["rank"] == 1 else ""),
        Text(mesh),
        Text(pretty_seconds(answer["step_s"])),
        Text(rounded(answer["tokens_per_s_per_device"])),
        Text("" if answer["mfu"] is None else percent(answer["mfu"])),
        Text(pretty_bytes(answer["needed_bytes"]), style="" if row["unbeaten"] else "dim"),
        Text(pretty_bytes(row["bytes_between_domains"])),
        Text("" if loss is None else f"{loss['what']}, {pretty_seconds(max(0.0, loss['seconds']))} longer"),
    ]


def _commands(rows: Sequence[Mapping[str, Any]], file: Path | None) -> list[str]:
    lines = [f"{row['rank']}  {row['command']}" for row in rows]
    if file is None and any(row["layout_file"] is not None for row in rows):
        lines.append(
            "With --out FILE.json the layouts that are no presets are written to files, which these commands name."
        )
    return lines


def _notes(value: Mapping[str, Any]) -> list[str]:
    lines, rows, chosen = [], value["answers"], value["chosen"]
    if chosen:
        lines.append(f"chosen for all: {' '.join(f'{option} {text}' for option, text in chosen.items())}")
    if rows:
        equal = "Ranks with = are equally fast by this clock: within 1%, the smallest first."
        lines.append(equal)
    share = 1 - value["memory_share"]
    if rows:
        lines.append(
            f"{percent(share)} of a device's memory stays free: estimates are no finer."
            if share
            else "Nothing fits with a reserve of memory: these may need more than they are planned to."
        )
    if value["complete"] and rows:
        more = f"more than {percent(value['within'])} " if value["within"] else ""
        lines.append(
            f"Certain: nothing that fits and runs is {more}faster than the first. The others are the best of those priced."
        )
    elif not value["complete"]:
        least = value["least_seconds_left"]
        left = (
            f"of what is left, no step is faster than {pretty_seconds(least)}"
            if least
            else "some layouts have no bound"
        )
        more = "" if rows else ", and it has no answer so far: give a larger --budget"
        lines.append(f"The budget ended the search{more or ': '}{'' if more else left}.")
    elif TOO_LARGE not in value["ended"] and "compile" not in value:
        lines.append("No layout has a plan without an error: with other rows, tokens or devices one may have.")
    if "compile" in value:
        lines += compile_notes(value)
    if value["ended"]:
        ended = (f"{code} {number:,} ({CODES[code].title})" for code, number in value["ended"].items())
        lines.append(f"ended: {'; '.join(ended)}")
    if not rows and value.get("nearest"):
        nearest = value["nearest"]
        mesh = " ".join(f"{axis}={size}" for axis, size in nearest["mesh"].items())
        found = "Nothing fits" if value["complete"] else "Nothing that fits was priced before the budget ended"
        lines.append(
            f"{found}. Nearest of what does not fit: {nearest['layout']} with {mesh}, {pretty_bytes(nearest['needed_bytes'])} of "
            f"{pretty_bytes(nearest['usable_bytes'])} a device, {pretty_bytes(nearest['missing_bytes'])} too much."
        )
    if value.get("smallest_machine"):
        lines.append(f"The smallest machine of these chips on which it fits: {value['smallest_machine']}")
    return lines
