"""`shardwright plan`."""

from __future__ import annotations

import sys

from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import planned, typed_request, with_choice
from shardwright.cli.typed.verbs import PlanVerb


def run_plan(verb: PlanVerb) -> int:
    """Print the plan. Returns 1 if it has a finding of severity error."""
    verb = with_named_model(verb)
    typed = with_choice(typed_request(verb.model, verb.layout, verb.plan), verb.layout, verb.plan)
    plan = planned(typed)
    if verb.plan.json:
        write_json(plan.to_json())
    else:
        from shardwright.report.plan.plan_view import plan_view

        write_view(plan_view(plan, typed.chosen), sys.stdout)
    return 1 if plan.errors else 0
