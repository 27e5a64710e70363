"""`shardwright compare`: several layouts under the same options, a column each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shardwright.cli.reviewing.sides import ComparedSide, compared_sides
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import options_text
from shardwright.cli.typed.verbs import CompareVerb
from shardwright.core.findings.errors import InputError


def run_compare(verb: CompareVerb) -> int:
    """Print the table. Always 0."""
    verb = with_named_model(verb, has_findings=False)
    if len(verb.sides) < 2:
        raise InputError("compare takes two layouts, plans or locks at least. `shardwright plan` shows one.")
    sides = compared_sides(verb.sides, verb.model, verb.plan)
    if verb.plan.json:
        write_json({"compared": [_json(side) for side in sides]})
    else:
        from shardwright.report.review.comparison_view import comparison_view

        notes = [options_text(side.chosen) if side.chosen else "" for side in sides]
        write_view(comparison_view([side.name for side in sides], [side.rows for side in sides], notes), sys.stdout)
    return 0


def _json(side: ComparedSide) -> Mapping[str, Any]:
    rows = side.rows
    return {
        "name": side.name,
        **{key: rows[key] for key in ("model", "layout", "mesh", "engine", "batch", "length")},
        "answer": rows.get("answer"),
        "memory": rows["memory"],
        "sent_bytes_per_step": sent_bytes(rows),
        "errors": sum(finding["severity"] == "error" for finding in rows["findings"]),
        **({"chosen": dict(side.chosen)} if side.chosen else {}),
    }


def sent_bytes(rows: Mapping[str, Any]) -> int:
    """Bytes of the collectives of a step, per device."""
    return sum(row["bytes_per_device"] * row["count_per_step"] for row in rows["collectives"])
