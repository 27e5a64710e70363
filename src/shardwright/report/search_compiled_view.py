"""The part of a search's view about programs: what was predicted of each answer beside what it compiled to, and what dropped out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from shardwright.report.text.columns import Column, RowGroup, aligned
from shardwright.report.text.units import pretty_bytes, pretty_seconds, several

COLUMNS = (
    Column(header="rank", right=True),
    Column(header="planned rank", right=True, flexible=True),
    Column(header="layout", flexible=True),
    Column(header="step", right=True),
    Column(header="compiled", right=True),
    Column(header="on links", right=True, flexible=True),
    Column(header="compiled", right=True),
    Column(header="moved", right=True),
    Column(header="compiled", right=True),
    Column(header="memory", right=True),
    Column(header="compiled", right=True),
)


def compiled_table(value: Mapping[str, Any], width: int) -> RenderableType:
    """Each answer with a program: predicted, and beside it compiled."""
    rows = [row for row in value["answers"] if row.get("compiled")]
    return aligned(COLUMNS, [RowGroup(cells=[_cells(row) for row in rows])], width)


def compile_notes(value: Mapping[str, Any]) -> Iterator[str]:
    """What dropped out, and why there are not as many programs as were asked for."""
    compiling = value["compile"]
    for answer in compiling["dropped"]:
        mesh = " ".join(f"{axis}={size}" for axis, size in answer["mesh"].items() if size > 1)
        verb = "does not fit" if answer["state"] == "too large" else "was not compiled"
        yield f"planned rank {answer['planned_rank']}, {answer['layout']} {mesh}: {verb}. {answer['line']}"
    wanted, there = compiling["wanted"], compiling["compiled"]
    if there:
        yield (
            "Ranks are those of the compiled programs: by the step with their collectives in place of the planned ones, at the "
            "plan's rates. Exchanges of tokens count as planned: programs have buffers for more."
        )
    if there < wanted:
        why = {
            "budget": "--compile-budget ended the compiling: a larger one goes on, with --out from here",
            "interrupted": "an interrupt ended the compiling: with --out the same command goes on from here",
            "complete": "no other answer was kept: give a larger --keep",
        }[compiling["ended"]]
        yield f"{several(there, 'program')} of {wanted}: {why}."
    if there and there < len(value["answers"]):
        yield "The answers after those with a program were not compiled."


def _cells(row: Mapping[str, Any]) -> list[Text]:
    planned, compiled = row["compiled"]["planned"], row["compiled"]["compiled"]

    def seconds(name: str) -> list[Text]:
        return [Text("" if side[name] is None else pretty_seconds(side[name])) for side in (planned, compiled)]

    def num_bytes(name: str) -> list[Text]:
        return [Text(pretty_bytes(side[name])) for side in (planned, compiled)]

    mesh = " ".join(f"{axis}={size}" for axis, size in row["mesh"].items() if size > 1)
    return [
        Text(str(row["rank"]), style="bold" if row["rank"] == 1 else ""),
        Text(str(row["planned_rank"])),
        Text(f"{row['layout']} {mesh}".rstrip()),
        *seconds("step_seconds"),
        *seconds("link_seconds"),
        *num_bytes("moved_bytes"),
        *num_bytes("memory_bytes"),
    ]
