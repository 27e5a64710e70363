"""`shardwright export maxtext`."""

from __future__ import annotations

import sys

from shardwright.cli.interop.import_ import write_atomically
from shardwright.cli.interop.import_options import ExportVerb
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import typed_request
from shardwright.core.findings.errors import InputError
from shardwright.core.planning import make_plan


def run_export(verb: ExportVerb) -> int:
    """Print or write the rules of a layout. Returns 1, and writes no file, where they would store a weight elsewhere."""
    from shardwright.interop.maxtext.export import export_maxtext

    if verb.model is None:
        raise InputError("export: rules are written for a model. Give one: --model mixtral-8x7b.")
    options = PlanOptions(mesh=verb.mesh, devices=verb.devices, move=verb.move, set=verb.set)
    found = export_maxtext(make_plan(typed_request(verb.model, verb.layout, options).request))
    wrong = any(finding.severity == "error" for finding in found.findings)
    if verb.out is not None and not wrong:
        write_atomically(verb.out, found.text)
    if verb.json:
        write_json(found.to_json())
        return 1 if wrong else 0
    if verb.out is None:
        sys.stdout.write(found.text)
    if found.findings:
        from shardwright.report.plan.findings_view import findings_list

        write_view(lambda width: findings_list(found.findings, width), sys.stderr)
    return 1 if wrong else 0
