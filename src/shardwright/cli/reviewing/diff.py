"""`shardwright diff`: two layouts under the same options, or plans and locks from files."""

from __future__ import annotations

import sys

from shardwright.cli.reviewing.sides import compared_sides
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import options_text
from shardwright.cli.typed.verbs import DiffVerb
from shardwright.locks.difference import difference

SIDES = ("before", "after")


def run_diff(verb: DiffVerb) -> int:
    """Print what moves from A to B. Always 0."""
    verb = with_named_model(verb, has_findings=False)
    before, after = compared_sides((verb.a, verb.b), verb.model, verb.plan)
    found = difference(before.rows, after.rows)
    chosen = (before.chosen, after.chosen)
    if verb.plan.json:
        write_json({**found.to_json(), **({"chosen": dict(zip(SIDES, chosen, strict=True))} if any(chosen) else {})})
    else:
        from shardwright.report.review.difference_view import difference_view

        notes = [f"{options_text(choice)}: chosen for {verb.plan.chips}" if choice else "" for choice in chosen]
        write_view(difference_view(found, notes=(notes[0], notes[1])), sys.stdout)
    return 0
