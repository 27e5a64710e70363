"""How one lock stands, as people look at it: in a line where nothing moved."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from shardwright.core.findings.finding import Finding
from shardwright.core.layout.declaration import DeclaredChange
from shardwright.locks.difference import Difference
from shardwright.report.plan.findings_view import findings_list
from shardwright.report.review.difference_view import difference_view
from shardwright.report.text.terminal import View

SIDES = ("locked", "now")


def check_view(
    path: str,
    found: Difference | None,
    declared: Sequence[DeclaredChange],
    findings: Sequence[Finding],
    *,
    written: bool,
) -> View:
    """Draws what `check` found. ``written``: the lock was written anew."""

    def view(width: int) -> RenderableType:
        parts: list[RenderableType] = [Text.assemble((path, "bold"), f": {_state(found, declared, written=written)}")]
        if found is not None and (found.moved or found.said):
            parts += [Text(""), difference_view(found, SIDES)(width)]
        elif declared and not written:
            parts += [Text(f"  {change.text}", style="dim") for change in declared]
        if findings:
            parts += [
                *([] if found is not None and (found.moved or found.said) else [Text("")]),
                findings_list(findings, width),
            ]
        return Group(*parts)

    return view


def _state(found: Difference | None, declared: Sequence[DeclaredChange], *, written: bool) -> str:
    if found is None:
        return "there is no plan to compare it with"
    if found.moved:
        return "moved; written anew" if written else "moved"
    if found.said:
        return "asks otherwise; written anew" if written else "asks otherwise"
    number = len(found.tensors) + found.num_unchanged
    said = f"nothing moved, {number} tensors and all collectives are as they were locked"
    if written:
        return f"{said}; written anew"
    return f"{said}, though it is declared in other words" if declared else said
