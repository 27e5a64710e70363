"""The view of a folder of another program that was imported, or of one that was exported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import RenderableType

from shardwright.report.interop.weights_view import headed
from shardwright.report.text.terminal import View
from shardwright.report.text.units import pretty_bytes, several

MOST_NAMES = 4


def converted_view(converted: Mapping[str, Any]) -> View:
    """What was written, of what, and what was left out."""

    def view(width: int) -> RenderableType:
        if "folder" in converted:
            tensors = (
                f"{several(converted['num_tensors'], 'tensor')}, {pretty_bytes(converted['bytes'])} in "
                f"{several(converted['num_files'], 'file')}"
            )
            lines = [("from", converted["from"]), ("step", str(converted["step"])), ("tensors", tensors)]
            if converted["values"]:
                lines.append(("values", _names(converted["values"])))
            return headed(f"exported to {converted['folder']}", lines, width)
        boxes = converted["num_boxes"]
        dtypes = f" in {', '.join(converted['dtypes'])}" if converted["dtypes"] else ""
        tensors = (
            f"{several(converted['num_tensors'], 'tensor')} in {boxes:,} {'box' if boxes == 1 else 'boxes'}, "
            f"{pretty_bytes(converted['bytes'])}{dtypes}"
        )
        lines = [("from", converted["from"]), ("as", converted["form"]), ("tensors", tensors)]
        if converted["values"]:
            lines.append(("values", _names(converted["values"])))
        if converted["left_out"]:
            lines.append(("left out", _names(converted["left_out"])))
        if converted.get("unverified"):
            lines.append(("unverified", f"{_names(converted['unverified'])}: saved without a digest"))
        if converted.get("pickles_executed"):
            lines.append(("pickles", "executed by Python's unpickler, as --trust-pickle asks"))
        return headed(f"imported to {converted['directory']}", lines, width)

    return view


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names):,}, as {names[0]}"
