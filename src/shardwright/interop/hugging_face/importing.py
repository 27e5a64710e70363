"""From a Hugging Face file to a model table, a layout, or both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.layout import Layout
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.interop.hugging_face.command import command
from shardwright.interop.hugging_face.config import Model, model_of
from shardwright.interop.hugging_face.published import is_config, read_config
from shardwright.interop.hugging_face.tp_plan import layout_of, plan_in, plan_place, read_plan
from shardwright.interop.layout_text import layout_text, same_layout
from shardwright.models import build


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceRequest:
    """What to import. ``model``: the one whose weights a plan without a configuration shards; ``devices``: to plan the layout on."""

    file: str
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingFaceImport:
    """A model where the file is a configuration, a layout where it has a plan, and every finding."""

    table: ModelTable
    model: Model | None
    layout: Layout | None
    plan: Plan | None
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "model": self.table.name,
            "family": self.table.family,
            "num_parameters": self.table.num_parameters,
            "num_layers": self.table.num_layers,
            "command": None if self.model is None else command(self.model),
            "dimensions": {} if self.model is None else asdict(self.model.size.config),
            "weights": [
                {
                    "name": weight.name,
                    "component": weight.component,
                    "logical_axes": list(weight.logical_axes),
                    "shape": list(weight.shape),
                    "num": weight.num,
                    "hugging_face": weight.hugging_face,
                }
                for weight in self.table.weights
            ],
            "layout": None if self.layout is None else layout_text(self.layout),
            "findings": [finding.to_json() for finding in self.findings],
        }


def import_hugging_face(request: HuggingFaceRequest) -> HuggingFaceImport:
    """Read a ``config.json``, or only a plan.

    Raises InputError for a file that is neither, for a model of no family here, and for a plan without a model.
    """
    published = read_config(request.file)
    model = model_of(published) if is_config(published) else None
    found = plan_in(published)
    if model is None and (not found or not all(isinstance(value, str) for value in found.values())):
        raise InputError(
            f"{request.file}: neither a configuration ('model_type' is missing) nor a plan of module patterns and styles."
        )
    if model is not None:
        table = model.table
    elif request.model is not None:
        table = build(request.model, request.settings)
    else:
        raise InputError(f"{request.file}: only a plan. Give the model whose weights it shards: --model llama3-8b.")
    findings = list(model.findings) if model else []
    layout, plan = None, None
    if found:
        read = read_plan(published, found)
        findings += read.findings
        if not any(finding.severity == "error" for finding in read.findings):
            layout, unsupported = layout_of(published, read, table)
            layout = same_layout(layout, request.file, {"tensor": plan_place(published)})
            findings += unsupported
            plan = _planned(layout, table, request.devices, findings)
    return HuggingFaceImport(table=table, model=model, layout=layout, plan=plan, findings=worst_first(findings))


def _planned(layout: Layout, table: ModelTable, devices: int | None, findings: list[Finding]) -> Plan | None:
    if devices is None:
        return None
    request = Request(
        layout=layout,
        table=table,
        batch=table.natural_batch or 1,
        length=table.natural_length or 1,
        devices=devices,
        engine="torch",
        dtype=table.dtype,
    )
    try:
        plan = make_plan(request)
    except FindingsError as error:
        findings += error.findings
        return None
    findings += [finding for finding in plan.findings if finding.code in ("SW107", "SW104")]
    return plan
