"""The view of one checked lock: one line where nothing moved."""

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
    """Draws the result of `check`. ``written``: the lock was written again."""

    def view(width: int) -> RenderableType:
        parts: list[RenderableType] = [Text.assemble((path, "bold"), f": {_state(found, declared, written=written)}")]
        if found is not None and (found.moved or found.requested):
            parts += [Text(""), difference_view(found, SIDES)(width)]
        elif declared and not written:
            parts += [Text(f"  {change.text}", style="dim") for change in declared]
        if findings:
            parts += [
                *([] if found is not None and (found.moved or found.requested) else [Text("")]),
                findings_list(findings, width),
            ]
        return Group(*parts)

    return view


def _state(found: Difference | None, declared: Sequence[DeclaredChange], *, written: bool) -> str:
    if found is None:
        return "there is no plan to compare it with"
    if found.moved:
        return "moved; written anew" if written else "moved"
    if found.requested:
        return "the request differs; written anew" if written else "the request differs"
    number = len(found.tensors) + found.num_unchanged
    unchanged = f"nothing moved, {number} tensors and all collectives are as they were locked"
    if written:
        return f"{unchanged}; written anew"
    return f"{unchanged}, though it is declared in another form" if declared else unchanged
