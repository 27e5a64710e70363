"""`shardwright explain`: the page of a finding's code, or why a tensor of a plan lies as it does."""

from __future__ import annotations

import sys
from dataclasses import replace

from shardwright.cli.pages import page_of
from shardwright.cli.typed.model_file import with_named_model
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import planned, typed_request, with_choice
from shardwright.cli.typed.verbs import ExplainVerb
from shardwright.core.findings.codes import CODES
from shardwright.core.findings.errors import InputError
from shardwright.core.findings.nearest import did_you_mean
from shardwright.core.why import reasons
from shardwright.models import names


def run_explain(verb: ExplainVerb) -> int:
    """Print what a code means, an example with its fix, and why; or the axes that shard a tensor, and what decided it."""
    name = verb.tensor
    if name is None:
        return _code(verb)
    if verb.model.upper() in CODES:
        raise InputError(f"{verb.model} is the code of a finding, and has no tensors. Leave '{name}' out.")
    verb = with_named_model(verb, has_findings=False)
    plan = planned(with_choice(typed_request(verb.model, verb.layout, verb.plan), verb.layout, verb.plan))
    rows = plan.by_name
    if name not in rows:
        raise InputError(f"{verb.model} has no tensor '{name}'. {did_you_mean(name, rows)}")
    tensor = rows[name]
    why = tuple(reasons(plan, tensor))
    if verb.plan.json:
        write_json({**tensor.to_json(), "axes": [reason.to_json() for reason in why]})
    else:
        from shardwright.report.why_view import why_view

        write_view(why_view(plan, tensor, why), sys.stdout)
    return 0


def _code(verb: ExplainVerb) -> int:
    if verb.model in names():
        raise InputError(
            f"{verb.model} is a model: of which tensor? Give its name, as {verb.model} residual.final_norm."
        )
    if verb.model.upper() not in CODES:
        raise InputError(
            f"'{verb.model}' is no code of a finding. {did_you_mean(verb.model.upper(), CODES)} For a tensor give a model and the tensor's name, as "
            f"llama3-8b layers.attention.q."
        )
    if verb.layout is not None or replace(verb.plan, json=False) != PlanOptions():
        raise InputError(f"{verb.model.upper()} has a page, whatever the plan. Leave the options of a plan out.")
    page = page_of(verb.model)
    if verb.plan.json:
        code = CODES[verb.model.upper()]
        write_json({"code": code.code, "severity": code.severity, "title": code.title, "law": code.law, "page": page})
    else:
        sys.stdout.write(page)
    return 0
