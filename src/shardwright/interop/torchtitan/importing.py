"""From a TorchTitan file to a layout in roles, its ranks, and findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.errors import FindingsError
from shardwright.core.findings.finding import Finding, worst_first
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.wording import count
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.policies.policy import BASES
from shardwright.core.resolution.request import Request
from shardwright.interop.layout_text import layout_text, same_layout
from shardwright.interop.plan_command import plan_command
from shardwright.interop.torchtitan.degrees import Degrees, check_degrees, degrees_of
from shardwright.interop.torchtitan.layout import ep_is_no_box, layout_of, mesh_axes_of, mesh_of, rank_groups
from shardwright.interop.torchtitan.reading import read_section
from shardwright.interop.torchtitan.recomputation import FIELD, findings_of, policy_of
from shardwright.interop.torchtitan.rows import StepRows, in_its_words, rows_of
from shardwright.interop.torchtitan.section import Section
from shardwright.interop.torchtitan.stages import PipelineOptions, stages_of
from shardwright.interop.torchtitan.vocabulary import (
    AXES,
    COMPUTED_IN,
    MODELS,
    RESHARD,
    STEP_ROWS,
    STEP_TOKENS,
    STORED_IN,
)
from shardwright.models import build


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTitanRequest:
    """What to import. ``model``: the model to plan the layout for; ``config``: a function of a Python file; ``out``: the file that the
    layout is written to."""

    file: str
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None
    config: str | None = None
    batch: int | None = None
    length: int | None = None
    name: str = "torchtitan"
    out: str | None = None

    @property
    def layout_file(self) -> str:
        """The file that the layout is written to, or the one to name."""
        return self.out or f"{self.name}.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTitanImport:
    """The degrees, the layout and its mesh, the groups of rank 0, and every finding. ``plan``: where a model was named.

    ``rows``: of a step, where the file sets them. ``stages``: of its pipeline. ``remat``: the policy of recomputation, where a model is planned. ``model``: TorchTitan's family and flavor. ``layout`` None: no mesh axes
    express the degrees, and a finding gives the reason. ``not_read``: options of the file from which nothing here follows. ``command``: it
    plans the same, from the layout's file.
    """

    degrees: Degrees
    layout: Layout | None
    mesh: Mesh | None
    groups: Mapping[str, tuple[int, ...]]
    plan: Plan | None
    rows: StepRows | None
    stages: PipelineOptions | None
    model: tuple[str, str] | None
    findings: tuple[Finding, ...]
    chosen: Mapping[str, str]
    remat: str | None = None
    not_read: tuple[str, ...] = ()
    command: str | None = None

    def to_json(self) -> dict[str, object]:
        return {
            "degrees": {**self.degrees.sizes, "ep": self.degrees.ep},
            "sequence_parallel": self.degrees.sequence_parallel,
            "mesh": None if self.mesh is None else dict(self.mesh.shape),
            "groups": {name: list(group) for name, group in self.groups.items()},
            "chosen": dict(self.chosen),
            "not_read": list(self.not_read),
            "plan_it": self.command,
            "step": None if self.rows is None else self.rows.to_json(),
            **({} if self.stages is None else {"stages": self.stages.units, "schedule": self.stages.schedule}),
            **({} if self.remat is None else {"remat": self.remat}),
            "torchtitan_model": None if self.model is None else " ".join(self.model),
            "layout": None if self.layout is None else layout_text(self.layout),
            "model": None if self.plan is None else self.plan.request.table.name,
            "tensors": [] if self.plan is None else [tensor.to_json() for tensor in self.plan.weights],
            "findings": [finding.to_json() for finding in self.findings],
        }


def import_torchtitan(request: TorchTitanRequest) -> TorchTitanImport:
    """Read, lay out and check; plan where the request or the file names a model.

    Raises InputError for a file that cannot be read, and FindingsError (SW106) for degrees whose product is not the world size.
    """
    section = read_section(request.file, request.config)
    model = request.model or model_of(section)
    found = imported(request, section, None if model is None else build(model, request.settings))
    if found.plan is None or model is None:
        return found
    return replace(found, command=plan_command(found.plan.request, request.layout_file, model, request.settings))


def imported(request: TorchTitanRequest, section: Section, table: ModelTable | None) -> TorchTitanImport:
    """As ``import_torchtitan``, of options that have been read. ``table``: the model to plan the layout for.

    Raises FindingsError (SW106) for degrees whose product is not the world size.
    """
    natural = prod((table.natural_mesh or {}).values()) if table else None
    degrees, chosen = degrees_of(section, request.devices, natural)
    findings = list(check_degrees(section, degrees, table))
    rows = rows_of(section, degrees)
    if isinstance(rows, Finding):
        findings.append(rows)
        rows = None
    stages = stages_of(section, degrees, table)
    if isinstance(stages, Finding):
        findings.append(stages)
        stages = None
    elif stages is not None and rows is not None and rows.passes > 1:
        findings.append(_one_timetable(section, rows))
    blocked = any(finding.code == "SW109" and finding.severity == "error" for finding in findings)
    axes = None if blocked else mesh_axes_of(degrees)
    if axes is None:
        if not blocked:
            findings.append(ep_is_no_box(degrees, section.positions.get("expert_parallel_degree")))
        return TorchTitanImport(
            degrees=degrees,
            layout=None,
            mesh=None,
            groups={},
            plan=None,
            rows=rows,
            stages=stages,
            model=section.model,
            findings=worst_first(findings),
            chosen=chosen,
            not_read=section.not_read(planned=False),
        )
    degree_of = {axis: name for name, axis in AXES.items()}
    places = {axis.name: section.positions.get(degree_of[axis.degree]) for axis in axes}
    layout = same_layout(layout_of(degrees, axes, request.name, stages), request.file, places)
    mesh = mesh_of(axes)
    plan = remat = None
    if table is not None:
        if section.recomputation is not None:
            remat = policy_of(section.recomputation, table, degrees.ep, stay=_stays(section, degrees))
            findings += findings_of(section.recomputation, remat, table, in_stages=stages is not None)
            if not section.recomputation.stated:
                chosen = {**chosen, FIELD: section.recomputation.text}
        try:
            plan = make_plan(_request(request, section, layout, table, rows, degrees, stages, remat))
            # TorchTitan trains it, so our engine need not be able to.
            findings += [one for one in plan.findings if one.severity != "info" and one.code not in (NOT_RUN, "SW123")]
        except FindingsError as error:
            findings += error.findings
        if request.batch is None:
            findings = [in_its_words(one, section, rows) for one in findings]
        findings += _second_dim(degrees, table)
    return TorchTitanImport(
        degrees=degrees,
        layout=layout,
        mesh=mesh,
        groups=rank_groups(mesh, axes),
        plan=plan,
        rows=rows,
        stages=stages,
        model=section.model,
        findings=worst_first(findings),
        chosen=chosen,
        remat=remat,
        not_read=section.not_read(planned=table is not None),
    )


def _stays(section: Section, degrees: Degrees) -> bool:
    """Whether weights stay gathered to the backward pass: where the file says so, and by default in a pipeline."""
    return section.values.get(RESHARD, "default") == "never" or (
        degrees.sizes["pp"] > 1 and section.values.get(RESHARD, "default") == "default"
    )


def _one_timetable(section: Section, rows: StepRows) -> Finding:
    """Passes that accumulate gradients are timetables one after the other there."""
    step = next((name for name in (STEP_TOKENS, STEP_ROWS) if name in section.training), STEP_TOKENS)
    return Finding(
        code="SW123",
        severity="info",
        where=f"'{step}'",
        position=section.training_positions.get(step),
        found=f"{rows.passes} passes in a step: TorchTitan runs the schedule for {count(rows.microbatches_of_pass, 'microbatch')} in each, "
        f"and its ranks wait for each other at the ends of all",
        needed=f"nothing; here a step is one timetable of {rows.microbatches} microbatches, with the same gradients and fewer waits",
    )


def model_of(section: Section) -> str | None:
    """Our table with the same weights as the file's model; None where there is none."""
    return None if section.model is None or section.other_weights else MODELS.get(section.model)


def _request(
    request: TorchTitanRequest,
    section: Section,
    layout: Layout,
    table: ModelTable,
    rows: StepRows | None,
    degrees: Degrees,
    stages: PipelineOptions | None,
    remat: str | None,
) -> Request:
    batch = request.batch or (rows.batch if rows else table.natural_batch) or 1
    microbatches = rows.microbatches if rows is not None and request.batch is None else 1
    if stages is not None and (rows is None or request.batch is not None):
        # A microbatch for each row of a rank; where no step is known, for each stage, with which every schedule runs.
        ranks = degrees.sizes["dp_replicate"] * degrees.sizes["dp_shard"]
        microbatches = max(1, request.batch // ranks) if request.batch else degrees.sizes["pp"] * stages.virtual
        batch = request.batch or microbatches * ranks
    return Request(
        layout=layout,
        table=table,
        batch=batch,
        length=request.length or (rows.length if rows else table.natural_length) or 1,
        microbatches=microbatches,
        engine="torch",
        dtype=section.dtypes.get(COMPUTED_IN, table.dtype),
        weights_dtype=section.dtypes.get(STORED_IN, "float32"),
        moments_dtype=section.dtypes.get(STORED_IN, "float32"),
        stages=None if stages is None else stages.units,
        # Of single activations or layers beside stages our engine runs none, and a fix is one that it can run.
        remat=BASES[0] if remat is None or (stages is not None and remat not in BASES) else remat,
    )


def _second_dim(degrees: Degrees, table: ModelTable) -> list[Finding]:
    """Experts fewer than the ranks of efsdp x ep are sharded at rest on their second dim, which no role expresses."""
    experts = table.sizes.get("experts")
    if experts is None or degrees.ep == 1 or degrees.borrowable <= experts:
        return []
    return [
        Finding(
            code="SW123",
            severity="info",
            where=f"experts of {table.name} at rest",
            found=f"{experts} experts over efsdp {degrees.borrowable // degrees.ep} x ep {degrees.ep} = {degrees.borrowable} ranks: TorchTitan "
            "shards the first dim of each expert's matrices over efsdp; roles shard the experts",
            needed="the same sharding in both",
        )
    ]
