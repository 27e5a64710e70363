"""The view of several plans side by side: a column each, and which of those that fit is the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.report.review.answers_view import AS_FAST, answer_rows
from shardwright.report.text.columns import Column, RowGroup, aligned, paragraph
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several


def comparison_view(names: Sequence[str], plans: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> View:
    """Draws the plans, in the form of their JSON. ``notes``: of each, what was chosen for its chips."""

    def view(width: int) -> RenderableType:
        columns = [Column(header="", flexible=True)]
        columns += [Column(header=name, right=True, flexible=True) for name in names]
        models = {(plan["model"], plan["length"]) for plan in plans}
        rows = [
            *([["model", *(plan["model"] for plan in plans)]] if len(models) > 1 else []),
            *([["tokens of a row", *(f"{plan['length']:,}" for plan in plans)]] if len(models) > 1 else []),
            ["mesh", *(_mesh(plan["mesh"]) for plan in plans)],
            ["rows of a step", *(f"{plan['batch']:,}" for plan in plans)],
            ["memory of a device", *(pretty_bytes(plan["memory"]["total_bytes_per_device"]) for plan in plans)],
            *(row for row in answer_rows([plan.get("answer") for plan in plans]) if row[0] != "memory of a device"),
            ["state of a device", *(pretty_bytes(_state(plan)) for plan in plans)],
            ["activations", *(pretty_bytes(plan["memory"]["activations_bytes"]) for plan in plans)],
            ["through collectives", *(pretty_bytes(_through(plan)) for plan in plans)],
            ["errors", *(_errors(plan) for plan in plans)],
        ]
        table = aligned(columns, [RowGroup(cells=[[Text(cell) for cell in row] for row in rows])], width)
        chosen = {
            note: [name for name, other in zip(names, notes, strict=True) if other == note] for note in notes if note
        }
        said = [f"chosen for the chips: {note} ({', '.join(of)})" for note, of in chosen.items()]
        return Group(
            Text(
                f"{plans[0]['model']}, {several(plans[0]['length'], 'token')} a row"
                if len(models) == 1
                else "Models or rows differ.",
                style="bold",
            ),
            table,
            Text(""),
            *(paragraph(line, style="dim") for line in said),
            *([paragraph(verdict)] if (verdict := fastest(names, plans)) else []),
        )

    return view


def fastest(names: Sequence[str], plans: Sequence[Mapping[str, Any]]) -> str:
    """Which of the plans that fit and have no error trains the most tokens in a second. Those within ``AS_FAST`` are named together;
    nothing is said without chips, and of plans whose tokens are not alike.

    >>> plan = {"findings": [], "answer": {"fits": True, "tokens_per_s": 100.0}}
    >>> fastest(["A", "B"], [plan, {**plan, "answer": {"fits": False, "tokens_per_s": 200.0}}])
    'The fastest that fits is A.'
    """
    rates = {
        name: answer["tokens_per_s"]
        for name, plan in zip(names, plans, strict=True)
        if (answer := plan.get("answer")) and answer.get("fits") and "tokens_per_s" in answer and _errors(plan) == "0"
    }
    if not any(plan.get("answer") for plan in plans) or len({(p.get("model"), p.get("length")) for p in plans}) > 1:
        return ""
    if not rates:
        return "None of them is without an error, fits, and has a time."
    best = max(rates.values())
    equal = [name for name, rate in rates.items() if rate >= best / (1 + AS_FAST)]
    return (
        f"The fastest that fits is {equal[0]}."
        if len(equal) == 1
        else f"Equally fast, and fastest of those that fit: {', '.join(equal)}."
    )


def _mesh(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1) or "1 device"


def _state(plan: Mapping[str, Any]) -> int:
    memory = plan["memory"]
    return memory["total_bytes_per_device"] - memory["activations_bytes"]


def _through(plan: Mapping[str, Any]) -> int:
    return sum(row["bytes_per_device"] * row["count_per_step"] for row in plan["collectives"])


def _errors(plan: Mapping[str, Any]) -> str:
    return str(sum(finding["severity"] == "error" for finding in plan["findings"]))
