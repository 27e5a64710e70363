"""`shardwright export maxtext` and `shardwright export torchtitan`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from shardwright.cli.interop.import_options import ExportVerb
from shardwright.cli.typed.options import PlanOptions
from shardwright.cli.typed.output import write_json, write_view
from shardwright.cli.typed.request import typed_request
from shardwright.core.findings.errors import InputError
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.files import replace_text

if TYPE_CHECKING:
    from shardwright.interop.maxtext.export import Export
    from shardwright.interop.torchtitan.export import TorchTitanExport


def run_export(verb: ExportVerb) -> int:
    """Print or write a layout for another program. Returns 1, and writes no file, where it would store a weight elsewhere."""
    if verb.model is None:
        raise InputError("export: a layout is written for a model. Give one: --model mixtral-8x7b.")
    options = PlanOptions(
        mesh=verb.mesh,
        devices=verb.devices,
        batch=verb.batch,
        length=verb.length,
        microbatches=verb.microbatches,
        schedule=verb.schedule,
        stages=verb.stages,
        move=verb.move,
        remat=verb.remat,
        set=verb.set,
        engine="torch" if verb.to == "torchtitan" else None,
    )
    plan = make_plan(typed_request(verb.model, verb.layout, options).request)
    found = _torchtitan(plan) if verb.to == "torchtitan" else _maxtext(plan)
    wrong = any(finding.severity == "error" for finding in found.findings)
    if verb.out is not None and not wrong:
        replace_text(verb.out, found.text)
    if verb.json:
        write_json(found.to_json())
        return 1 if wrong else 0
    if verb.out is None:
        sys.stdout.write(found.text)
    if found.findings:
        from shardwright.report.plan.findings_view import findings_list

        write_view(lambda width: findings_list(found.findings, width), sys.stderr)
    return 1 if wrong else 0


def _maxtext(plan: Plan) -> Export:
    from shardwright.interop.maxtext.export import export_maxtext

    return export_maxtext(plan)


def _torchtitan(plan: Plan) -> TorchTitanExport:
    from shardwright.interop.torchtitan.export import export_torchtitan

    return export_torchtitan(plan)
