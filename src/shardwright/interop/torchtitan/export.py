"""A layout of ours as a configuration of TorchTitan: degrees, rows of a step, schedule and units of the stages.

| role of an axis | degree |
|---|---|
| stage, data, fsdp, context, tensor in attention | pp, dp_replicate, dp_shard, cp, tp |
| expert in ``moe`` | ep: the innermost ranks of dp_shard x cp x tp |

The text is read and planned again, as a file of a user's, and compared with the plan before it is returned: the place of every tensor
on every rank, the stages and the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from re import sub

from shardwright.core.findings.codes import Severity
from shardwright.core.findings.errors import FindingsError, InputError
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import count, either, others
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.stages.assignment import Stage
from shardwright.interop.torchtitan.importing import TorchTitanImport, TorchTitanRequest, imported
from shardwright.interop.torchtitan.layout import ROLES_OUTSIDE_MOE
from shardwright.interop.torchtitan.reading import parse_section
from shardwright.interop.torchtitan.recomputation import FIELD, class_for, same_policy
from shardwright.interop.torchtitan.stages import MODULES, NAMES, SCHEDULE
from shardwright.interop.torchtitan.vocabulary import (
    AXES,
    CONTEXT,
    MICROBATCHES,
    MODELS,
    RESHARD,
    SEQUENCE,
    STEP_TOKENS,
    TOKENS,
)
from shardwright.models import build

EP = "expert_parallel_degree"
DEGREE_OF_ROLE = {role: degree for degree, role in ROLES_OUTSIDE_MOE.items()}
NAME_OF_DEGREE = {axis: name for name, axis in AXES.items()}

Placed = tuple[tuple[tuple[int, int], ...], ...]
"""Of each dim, the sizes and strides over the ranks of what shards it, major first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTitanExport:
    """The options, the text of a Python file, and findings on what they cannot express. ``compared``: the tensors whose place is the same
    when the file is read again."""

    plan: Plan
    options: Mapping[str, object]
    text: str
    compared: int
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "layout": self.plan.request.layout.name,
            "model": self.plan.request.table.name,
            "mesh": dict(self.plan.mesh.shape),
            "options": dict(self.options),
            "text": self.text,
            "compared": self.compared,
            "findings": [finding.to_json() for finding in self.findings],
        }


def export_torchtitan(plan: Plan) -> TorchTitanExport:
    """The configuration of a plan of PyTorch's engine.

    Raises InputError for a role or an order of axes that no degrees express, for a schedule that TorchTitan does not have, and for updates
    that an axis shards.
    """
    _updates_are_plain(plan)
    parallelism = {**_degrees(plan), **_options(plan), **_pipeline(plan)}
    training = _step(plan)
    model = _model(plan)
    stay = parallelism.get(RESHARD) == "never" or plan.pipeline is not None
    kept = class_for(plan.request.remat, plan.request.table, int(str(parallelism[EP])), stay=stay)
    text = _text(plan, parallelism, training, model, kept)
    found = _read_again(plan, text)
    again = found.plan
    assert again is not None
    compared = [row for row in plan.tensors if row.name in again.by_name]
    different = [row for row in compared if _placed(plan, row) != _placed(again, again.by_name[row.name])]
    return TorchTitanExport(
        plan=plan,
        options={**training, **parallelism},
        text=text,
        compared=len(compared) - len(different),
        findings=tuple(_findings(plan, again, different, found.remat)),
    )


def _updates_are_plain(plan: Plan) -> None:
    for axis, entry in plan.request.layout.entries.items():
        if entry.optimizer is not None:
            raise InputError(
                f"layout '{plan.request.layout.name}': 'optimizer' of axis '{axis}' has no option in TorchTitan, whose replicas have "
                f"all of the optimizer's tensors. Take it out."
            )


def _degrees(plan: Plan) -> dict[str, object]:
    """The degrees, where the axes are in the order of TorchTitan's ranks."""
    layout, mesh = plan.request.layout, plan.mesh
    sizes = dict.fromkeys(DEGREE_OF_ROLE.values(), 1)
    before: tuple[str, str] | None = None
    for axis in mesh.larger_than_one(mesh.names):
        role = layout.role(axis, "attention")
        if role not in DEGREE_OF_ROLE:
            raise InputError(
                f"layout '{layout.name}': axis '{axis}' has role '{role}' in attention, and TorchTitan's degrees are those of "
                f"{either(DEGREE_OF_ROLE)} there."
            )
        degree = DEGREE_OF_ROLE[role]
        order = [*ROLES_OUTSIDE_MOE]
        if before is not None and order.index(degree) < order.index(before[1]):
            raise InputError(
                f"layout '{layout.name}': axis '{axis}', its {degree}, is behind '{before[0]}', its {before[1]}: TorchTitan's ranks "
                f"have the order {', '.join(order)}, the last one fastest. Name the axes of the mesh in this order."
            )
        before = axis, degree
        sizes[degree] *= mesh.size(axis)
    experts = layout.axes_with("expert", "moe") if plan.request.table.top_k is not None else ()
    return {**{NAME_OF_DEGREE[degree]: size for degree, size in sizes.items()}, EP: mesh.size(experts)}


def _options(plan: Plan) -> dict[str, object]:
    entries = [plan.request.layout.entries[axis] for axis in plan.mesh.larger_than_one(plan.mesh.names)]
    tensor = [entry for entry in entries if "tensor" in entry.roles.values()]
    found: dict[str, object] = {}
    if tensor and not any(entry.sequence_parallel for entry in tensor):
        found[SEQUENCE] = False
    if plan.pipeline is None and any(entry.keep_gathered for entry in entries):
        found[RESHARD] = "never"
    return found


def _pipeline(plan: Plan) -> dict[str, object]:
    if plan.pipeline is None:
        return {}
    choice = plan.pipeline.choice
    theirs = {ours: name for name, ours in NAMES.items()}
    if choice.schedule not in theirs:
        raise InputError(
            f"layout '{plan.request.layout.name}': TorchTitan has no schedule '{choice.schedule}'. Give --schedule "
            f"{either(sorted(theirs))}."
        )
    return {
        SCHEDULE: theirs[choice.schedule],
        MICROBATCHES: plan.request.microbatches,
        MODULES: [[*_modules(stage)] for stage in choice.stages],
    }


def _modules(stage: Stage) -> Iterator[str]:
    if stage.embedding:
        yield "tok_embeddings"
    yield from (f"layers.{number}" for number in stage.layers)
    if stage.logits:
        yield from ("norm", "output")


def _step(plan: Plan) -> dict[str, object]:
    """Tokens of a rank's microbatch, of a step and of a row. Without stages its microbatches are passes that accumulate gradients."""
    request = plan.request
    ranks = plan.mesh.size(plan.dp)
    if request.batch % (ranks * request.microbatches):
        raise InputError(
            f"{count(request.batch, 'row')} of a step {'does' if request.batch == 1 else 'do'} not divide into {count(request.microbatches, 'microbatch')} of "
            f"{count(ranks, 'data-parallel rank')}, which TorchTitan counts in tokens of a rank's microbatch. Give --batch "
            f"{-(-request.batch // (ranks * request.microbatches)) * ranks * request.microbatches}."
        )
    return {
        TOKENS: request.batch // ranks // request.microbatches * request.length,
        STEP_TOKENS: request.batch * request.length,
        CONTEXT: request.length,
    }


def _model(plan: Plan) -> tuple[str, str] | None:
    """TorchTitan's family and flavor with the same weights."""
    table = plan.request.table
    theirs = {ours: pair for pair, ours in MODELS.items()}.get(table.name)
    return theirs if theirs is not None and build(table.name).weights == table.weights else None


def _text(
    plan: Plan,
    parallelism: Mapping[str, object],
    training: Mapping[str, object],
    model: tuple[str, str] | None,
    kept: str | None,
) -> str:
    """A Python file with a function that builds the configuration; everything else has TorchTitan's defaults."""
    name = sub(r"\W+", "_", f"{plan.request.table.name}_{plan.request.layout.name}").strip("_").lower()
    imports = ["from torchtitan.config import ParallelismConfig, TrainingConfig"]
    if kept is not None:
        imports.append(f"from torchtitan.distributed.activation_checkpoint import {kept}")
    if model is not None:
        imports.append(f"from torchtitan.models.{model[0]} import model_registry")
    imports.append("from torchtitan.trainer import Trainer")
    lines = [
        f"# Layout '{plan.request.layout.name}' for {plan.request.table.name} on {count(plan.mesh.num_devices, 'rank')}, written by shardwright.",
        *imports,
        "",
        "",
        f"def {name if name[0].isalpha() else f'layout_{name}'}():",
        "    return Trainer.Config(",
        *([] if model is None else [f'        model_spec=model_registry("{model[1]}"),']),
        *_call("training", "TrainingConfig", training),
        *_call("parallelism", "ParallelismConfig", parallelism),
        f"        {FIELD}={'None' if kept is None else f'{kept}.Config()'},",
        "    )",
    ]
    return "\n".join(lines) + "\n"


def _call(section: str, kind: str, options: Mapping[str, object]) -> Iterator[str]:
    yield f"        {section}={kind}("
    for name, value in options.items():
        if isinstance(value, list):
            yield f"            {name}=["
            yield from (f"                [{', '.join(_quoted(one) for one in part)}]," for part in value)
            yield "            ],"
        else:
            yield f"            {name}={_quoted(value)},"
    yield "        ),"


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _read_again(plan: Plan, text: str) -> TorchTitanImport:
    request = plan.request
    asked = TorchTitanRequest(file="exported.py", devices=plan.mesh.num_devices, name=request.layout.name)
    try:
        found = imported(asked, parse_section(text, asked.file), request.table)
    except FindingsError as error:
        raise InputError(f"layout '{request.layout.name}' has no degrees: {error.findings[0].found}.") from None
    wrong = [one for one in found.findings if one.severity == "error"]
    if found.plan is None:
        raise InputError(f"layout '{request.layout.name}' has no degrees: {wrong[0].found}; needed: {wrong[0].needed}.")
    return found


def _placed(plan: Plan, row: TensorPlan) -> tuple[Placed, ...]:
    """Where a tensor is on the ranks, whatever the names of the axes."""
    return tuple(_strides(spec, plan.mesh) for spec in (row.at_rest, row.in_use) if spec is not None)


def _strides(spec: Spec, mesh: Mesh) -> Placed:
    """
    >>> mesh = Mesh.of(pp=2, dp=4, tp=2)
    >>> _strides(Spec.of(embed=["dp", "tp"], heads=[]), mesh), _strides(Spec.of(embed=["tp", "dp"]), mesh)
    ((((8, 1),), ()), (((2, 1), (4, 2)),))
    """
    strides = {
        name: prod(mesh.size(later) for later in mesh.names[place + 1 :]) for place, name in enumerate(mesh.names)
    }
    found = []
    for dim in spec.dims:
        parts: list[tuple[int, int]] = []
        for axis in dim.axes:
            size, stride = mesh.size(axis), strides[axis]
            if parts and parts[-1][1] == size * stride:
                parts[-1] = parts[-1][0] * size, stride
            elif size > 1:
                parts.append((size, stride))
        found.append(tuple(parts))
    return tuple(found)


def _findings(plan: Plan, again: Plan, different: Sequence[TensorPlan], remat: str | None) -> Iterator[Finding]:
    layout, model = plan.request.layout, plan.request.table.name
    where = f"layout '{layout.name}' in TorchTitan's degrees for {model}"
    severities: dict[str, Severity] = {"weight": "error", "activation": "info"}
    for kind, severity in severities.items():
        rows = [row for row in different if row.kind == kind]
        if rows:
            lines = "\n".join(
                f"{row.name}: {row.spec} here, {again.by_name[row.name].spec} by the degrees" for row in rows
            )
            yield Finding(
                code="SW123",
                severity=severity,
                tensor=rows[0].name,
                where=where,
                found=f"{count(len(rows), kind)} in another place ({others([row.name for row in rows], kind)})\n{lines}",
                needed="roles that its degrees have",
            )
    ours = _of_step(plan, plan.request.remat)
    theirs = _of_step(
        again,
        plan.request.remat
        if remat is not None and same_policy(plan.request.table, remat, plan.request.remat)
        else remat,
    )
    if ours != theirs:
        yield Finding(
            code="SW123",
            severity="error",
            where=where,
            found=f"{theirs} when it is read again",
            needed=ours,
        )
    moved = {"attention": (layout.move_attention, "gather"), "moe": (layout.move_moe, "all-to-all")}
    for what, (how, default) in moved.items():
        if how != default and layout.axes_with("context" if what == "attention" else "expert", what):
            yield Finding(
                code="SW123",
                severity="info",
                where=where,
                found=f"move: {{{what}: {how}}}, which is no degree",
                needed=f"nothing; TorchTitan's default is '{default}'",
            )


def _of_step(plan: Plan, remat: str | None) -> str:
    request, pipeline = plan.request, plan.pipeline
    stages = "no stages" if pipeline is None else f"stages {pipeline.choice.text} under '{pipeline.choice.schedule}'"
    kept = f"recomputed: {remat}"
    return f"{count(request.batch, 'row')} of {request.length:,} tokens, {count(request.microbatches, 'microbatch')}, {stages}, {kept}"
