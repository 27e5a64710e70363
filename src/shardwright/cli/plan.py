"""`shardwright plan`."""

from __future__ import annotations

import sys
from collections.abc import Collection

from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import planned, requested
from shardwright.cli.typed.verbs import PlanVerb
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean


def run_plan(verb: PlanVerb) -> int:
    """Print the plan. Returns 1 if it has a finding of severity error."""
    shows = None if verb.plan.json else _sections(verb)
    if shows is None and (verb.full or verb.show is not None):
        raise InputError(
            f"{'--full' if verb.full else '--show'} chooses what people see, and --json has everything. Leave one out."
        )
    verb = with_named_model(verb)
    typed = requested(verb.model, verb.layout, verb.plan)
    plan = planned(typed)
    if typed.machine is not None and plan.step is not None:
        from shardwright.search.neighbours import with_faster_neighbour

        plan = with_faster_neighbour(plan, typed.machine)
    if shows is None:
        write_json(plan.to_json())
    else:
        from shardwright.report.plan.plan_view import plan_view

        write_view(plan_view(plan, typed.chosen, shows=shows), sys.stdout)
    return 1 if plan.errors else 0


def _sections(verb: PlanVerb) -> Collection[str]:
    """The sections to show. Raises InputError for a name that no section has."""
    from shardwright.report.plan.plan_view import SECTIONS, SHOWN

    if verb.full:
        if verb.show is not None:
            raise InputError("--full shows every section. Leave --show out, or --full.")
        return SECTIONS
    if verb.show is None:
        return SHOWN
    names = [name.strip() for name in verb.show.split(",")]
    for name in names:
        if name not in SECTIONS:
            raise InputError(f"--show: '{name}' is no section of a plan. {did_you_mean(name, SECTIONS)}")
    return names
