"""From files to an imported configuration: located, merged, sized, resolved for a model, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.faults import shown
from shardwright.core.layout.wording import count
from shardwright.core.model.table import DTYPE_BYTES, ModelTable
from shardwright.core.policies.policy import BASES
from shardwright.interop.layout_text import layout_text, same_layout
from shardwright.interop.maxtext.checks import check
from shardwright.interop.maxtext.comparison import Comparison, compared
from shardwright.interop.maxtext.model import Model, model_of
from shardwright.interop.maxtext.planning import accumulated, devices_of_slice, request_of, slices_of, with_moves
from shardwright.interop.maxtext.policy import policy_of
from shardwright.interop.maxtext.reading.merging import Configuration
from shardwright.interop.maxtext.reading.pipeline import with_stages_first
from shardwright.interop.maxtext.reading.sizes import Devices, sized
from shardwright.interop.maxtext.resolution.annotations import EXPERT_NAMES, MoePath
from shardwright.interop.maxtext.resolution.placement import Imported, Placed, placed_under
from shardwright.interop.maxtext.resolution.tensors import StepShape
from shardwright.interop.maxtext.roles import layout_of
from shardwright.interop.maxtext.sources import MaxTextRequest, NoTableError, read_configuration
from shardwright.interop.maxtext.stages import PipelineSettings, settings_of
from shardwright.interop.maxtext.without_table import RulesAlone, rules_alone
from shardwright.interop.plan_command import plan_command


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxTextImport:
    """An imported configuration, the equivalent layout in roles, every finding, and the defaults that were chosen.

    ``comparison`` None: the mesh has one device. ``pipeline``: its settings, where there are stages. ``remat``: its policy of recomputation
    as ``--remat`` takes it; None where it has none. ``command``: it plans the same, from the layout's file.
    """

    imported: Imported
    comparison: Comparison | None
    pipeline: PipelineSettings | None
    findings: tuple[Finding, ...]
    chosen: Mapping[str, str]
    remat: str | None = None
    command: str | None = None

    def to_json(self) -> dict[str, object]:
        imported, comparison = self.imported, self.comparison
        return {
            "sources": list(imported.configuration.sources),
            "model": imported.table.name,
            "mesh": dict(imported.mesh.shape),
            "dialect": imported.dialect,
            "batch": imported.step.batch,
            "length": imported.step.length,
            "chosen": dict(self.chosen),
            "not_read": list(imported.configuration.not_read),
            "plan_it": self.command,
            "rules": [
                {"name": r.name, "axes": list(r.axes), "source": r.position.source, "line": r.position.line}
                for r in imported.rules
            ],
            "tensors": [_tensor(placed, imported) for placed in imported.placed],
            **({} if self.pipeline is None else {"pipeline": self.pipeline.to_json()}),
            **({} if self.remat is None else {"remat": self.remat}),
            "layout": None if comparison is None else layout_text(comparison.layout),
            "compared": 0 if comparison is None else comparison.compared,
            "differences": [] if comparison is None else [each.to_json() for each in comparison.differences],
            "findings": [finding.to_json() for finding in self.findings],
        }


def _tensor(placed: Placed, imported: Imported) -> dict[str, object]:
    tensor = placed.tensor
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "component": tensor.component,
        "names": list(tensor.names),
        "shape": list(tensor.shape),
        "num": tensor.num,
        "spec": placed.notation,
        "cuts": [list(axes) for axes in placed.dim_axes],
        "bytes_per_device": round(placed.bytes_per_device(imported.mesh) / tensor.num),
    }


def read_maxtext(request: MaxTextRequest) -> MaxTextImport | RulesAlone:
    """As ``import_maxtext``; of a model that no table of ours has, what its rules say by names."""
    try:
        return import_maxtext(request)
    except NoTableError as why:
        return rules_alone(request, read_configuration(request), why)


def import_maxtext(request: MaxTextRequest) -> MaxTextImport:
    """Read, merge, resolve and check.

    Raises InputError for files and values that cannot be read, and FindingsError (SW106) for sizes that give no mesh.
    """
    imported, model, sizes, chosen = _placed(request)
    findings = [
        *sizes,
        *_replaced(imported),
        *_left_out(imported),
        *check(imported),
    ]
    comparison = command = None
    pipeline = settings_of(imported.configuration, imported.table, imported.mesh.shape.get("stage", 1))
    if isinstance(pipeline, Finding):
        findings.append(pipeline)
        pipeline = None
    remat = policy_of(imported.configuration, imported.table)
    if isinstance(remat, Finding):
        findings.append(remat)
        remat = None
    layout = layout_of(imported, Path(request.file).stem, pipeline)
    if layout is not None:
        places = {str(scalar.value): scalar.position for scalar in imported.configuration.mesh_axes}
        layout = same_layout(with_moves(layout, imported.configuration), request.file, places)
        planned_with = request_of(imported, layout, pipeline)
        if remat is not None and (pipeline is None or remat in BASES):
            planned_with = replace(planned_with, remat=remat)
        try:
            comparison = compared(imported, planned_with)
            command = plan_command(planned_with, request.layout_file, model.name, model.settings)
        except FindingsError as error:
            findings += error.findings
            comparison = compared(imported, replace(planned_with, microbatches=1))
        if comparison.finding is not None:
            findings.append(comparison.finding)
    return MaxTextImport(
        imported=imported,
        comparison=comparison,
        pipeline=pipeline,
        findings=worst_first(findings),
        chosen=chosen,
        remat=remat,
        command=command,
    )


def placed_for(request: MaxTextRequest) -> tuple[Imported, tuple[Finding, ...], dict[str, str]]:
    """The placement of every tensor, findings on sizes and model, and the defaults that were chosen."""
    imported, _, findings, chosen = _placed(request)
    return imported, findings, chosen


def _placed(request: MaxTextRequest) -> tuple[Imported, Model, tuple[Finding, ...], dict[str, str]]:
    configuration = read_configuration(request)
    chosen: dict[str, str] = {}
    if configuration.base is not None:
        chosen["--base"] = configuration.base
    model = model_of(request.model, request.settings, configuration, request.like)
    if model.why is not None:
        chosen["--model"] = model.why
    table = model.table
    slices = slices_of(configuration) if request.slices is None else request.slices
    stated = request.mesh_sizes or {}
    of_slice = None if stated and -1 not in stated.values() else devices_of_slice(configuration)
    num = of_slice * slices if request.devices is None and of_slice is not None else request.devices
    devices = Devices(num=num, slices=slices, natural=table.natural_mesh or None, sizes=request.mesh_sizes)
    sizing = sized(configuration, devices)
    chosen.update(sizing.chosen)
    step = _step(request, configuration, table, sizing.mesh.num_devices, chosen)
    mesh = sizing.mesh
    step = replace(step, decodes_in_parallel=mesh.shape.get("context_autoregressive", 1) > 1)
    if mesh.shape.get("stage", 1) > 1:
        step = replace(step, pipelined=True)
        configuration, mesh = with_stages_first(configuration, mesh)
    imported = placed_under(configuration, mesh, table, step, request.dialect)
    if "--batch" in chosen:
        imported = _with_divisible_rows(imported, chosen)
    return imported, model, (*sizing.findings, *model.findings), chosen


def _replaced(imported: Imported) -> Iterator[Finding]:
    """SW112: dimensions set next to the name of a model, whose own file MaxText reads later."""
    for key, (old, new) in imported.configuration.replaced.items():
        yield Finding(
            code="SW112",
            severity="warning",
            where=f"'{key}' next to 'model_name'",
            position=old.position,
            found=f"{shown(old.value)}, and {new.position.source}:{new.position.line}, which MaxText reads after this file, "
            f"has {shown(new.value)}",
            needed=f"{shown(new.value)}, or '{key}' on the command line",
            fix=f"Take '{key}' out.",
        )


def _left_out(imported: Imported) -> Iterator[Finding]:
    """SW123: layers of the model that our table omits; they change no weight of the table."""
    scalar = imported.configuration.settings.get("mtp_num_layers")
    if scalar is not None and int(scalar.value) > 0:
        yield Finding(
            code="SW123",
            severity="info",
            where="'mtp_num_layers'",
            position=scalar.position,
            found=f"{count(int(scalar.value), 'layer')} for multi-token prediction, which the table of {imported.table.name} omits",
            needed="nothing: it changes no weight of the table",
        )


def _with_divisible_rows(imported: Imported, chosen: dict[str, str]) -> Imported:
    """The default number of rows, rounded up to a multiple of the shards of the batch."""
    stream = imported.activation("residual.stream")
    assert stream is not None
    shards = imported.mesh.size(stream.axes_of("batch"))
    rows = -(-imported.step.batch // shards) * shards
    chosen["--batch"] = str(rows)
    step = replace(imported.step, batch=rows)
    return placed_under(imported.configuration, imported.mesh, imported.table, step, imported.dialect)


def _step(
    request: MaxTextRequest, configuration: Configuration, table: ModelTable, devices: int, chosen: dict[str, str]
) -> StepShape:
    per_device, length = configuration.value_of("per_device_batch_size"), configuration.value_of("max_target_length")
    passes = accumulated(configuration)
    if request.batch is not None and request.batch % passes:
        place = configuration.settings["gradient_accumulation_steps"].position
        raise InputError(
            f"{place}: {count(passes, 'microbatch')} of a step, and --batch has {count(request.batch, 'row')}. Give a multiple of {passes}."
        )
    batch = (
        request.batch // passes if request.batch else max(1, int(float(per_device) * devices)) if per_device else None
    )
    tokens = request.length or (int(float(length)) if length else None)
    if batch is None:
        batch = table.natural_batch or devices
        chosen["--batch"] = str(batch)
    if tokens is None:
        tokens = table.natural_length or 4096
        chosen["--length"] = str(tokens)
    return StepShape(
        batch=batch,
        length=tokens,
        weight_dtype=_dtype(configuration, "weight_dtype", "float32"),
        dtype=_dtype(configuration, "dtype", table.dtype),
        path=_path(configuration),
        capacity_factor=_capacity(configuration),
        pipeline_layers=_pipeline_layers(configuration),
        scanned=configuration.value_of("scan_layers") is not False,
        expert_names=next((key for key in EXPERT_NAMES if configuration.value_of(key) is True), None),
        peel=configuration.value_of("moe_dispatch_no_expert_sharding") is True,
    )


def _pipeline_layers(configuration: Configuration) -> int | None:
    layers = configuration.value_of("pipeline_parallel_layers")
    return None if layers is None or int(layers) < 1 else int(layers)


def _dtype(configuration: Configuration, key: str, default: str) -> str:
    dtype = configuration.value_of(key)
    return str(dtype) if dtype in DTYPE_BYTES else default


def _capacity(configuration: Configuration) -> float | None:
    factor = configuration.value_of("capacity_factor")
    return float(factor) if factor is not None and float(factor) > 0 else None


def _path(configuration: Configuration) -> MoePath | None:
    """The MoE path that the settings choose; None where they set none."""
    sparse = configuration.value_of("sparse_matmul")
    if sparse is None:
        return None if _capacity(configuration) is None else "capacity"
    if sparse is True:
        return "sparse"
    return "dropless" if _capacity(configuration) is None else "capacity"
