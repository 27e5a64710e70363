"""From a file of TorchTitan's to a layout in roles, its ranks, and what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

from shardwright.core.errors import FindingsError
from shardwright.core.finding import Finding, worst_first
from shardwright.core.layout import Layout
from shardwright.core.mesh import Mesh
from shardwright.core.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.request import Request
from shardwright.core.table import ModelTable
from shardwright.interop.layout_text import layout_text, same_layout
from shardwright.interop.torchtitan.degrees import Degrees, check_degrees, degrees_of
from shardwright.interop.torchtitan.layout import layout_of, mesh_of, no_box, parts_of, ranks
from shardwright.interop.torchtitan.reading import read_section
from shardwright.models import build


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What to import. ``model``: one to plan the layout for; ``config``: a function of a Python file."""

    file: str
    model: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    devices: int | None = None
    config: str | None = None
    batch: int | None = None
    length: int | None = None
    name: str = "torchtitan"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTitanImport:
    """The degrees, the layout and its mesh, the groups of rank 0, and every finding. ``plan``: where a model was named.

    ``layout`` None: axes cannot say it, and a finding says why.
    """

    degrees: Degrees
    layout: Layout | None
    mesh: Mesh | None
    groups: Mapping[str, tuple[int, ...]]
    plan: Plan | None
    findings: tuple[Finding, ...]
    chosen: Mapping[str, str]

    def to_json(self) -> dict[str, object]:
        return {
            "degrees": {**self.degrees.sizes, "ep": self.degrees.ep},
            "sequence_parallel": self.degrees.sequence_parallel,
            "mesh": None if self.mesh is None else dict(self.mesh.shape),
            "groups": {name: list(group) for name, group in self.groups.items()},
            "chosen": dict(self.chosen),
            "layout": None if self.layout is None else layout_text(self.layout),
            "model": None if self.plan is None else self.plan.request.table.name,
            "tensors": [] if self.plan is None else [tensor.to_json() for tensor in self.plan.weights],
            "findings": [finding.to_json() for finding in self.findings],
        }


def import_torchtitan(asked: Asked) -> TorchTitanImport:
    """Read, lay out, check, and plan where a model is named.

    Raises InputError for a file that cannot be read, and FindingsError (SW106) for degrees that make no world.
    """
    section = read_section(asked.file, asked.config)
    table = None if asked.model is None else build(asked.model, asked.settings)
    natural = prod((table.natural_mesh or {}).values()) if table else None
    degrees, chosen = degrees_of(section, asked.devices, natural)
    findings = list(check_degrees(section, degrees, table))
    blocked = any(finding.code == "SW109" and finding.severity == "error" for finding in findings)
    parts = None if blocked else parts_of(degrees)
    if parts is None:
        if not blocked:
            findings.append(no_box(degrees, section.positions.get("expert_parallel_degree")))
        return TorchTitanImport(
            degrees=degrees, layout=None, mesh=None, groups={}, plan=None, findings=worst_first(findings), chosen=chosen
        )
    layout = same_layout(layout_of(degrees, parts, asked.name), f"{asked.name}.yaml")
    mesh = mesh_of(parts)
    plan = None
    if table is not None:
        try:
            plan = make_plan(_request(asked, layout, table))
            findings += [finding for finding in plan.findings if finding.severity != "info"]
        except FindingsError as error:
            findings += error.findings
        findings += _second_dim(degrees, table)
    return TorchTitanImport(
        degrees=degrees,
        layout=layout,
        mesh=mesh,
        groups=ranks(mesh, parts),
        plan=plan,
        findings=worst_first(findings),
        chosen=chosen,
    )


def _request(asked: Asked, layout: Layout, table: ModelTable) -> Request:
    return Request(
        layout=layout,
        table=table,
        batch=asked.batch or table.natural_batch or 1,
        length=asked.length or table.natural_length or 1,
        engine="torch",
        dtype=table.dtype,
    )


def _second_dim(degrees: Degrees, table: ModelTable) -> list[Finding]:
    """Experts that are fewer than the ranks of efsdp and ep rest cut along their second dim, as no role does."""
    experts = table.sizes.get("experts")
    if experts is None or degrees.ep == 1 or degrees.lent <= experts:
        return []
    return [
        Finding(
            code="SW123",
            severity="info",
            where=f"experts of {table.name} at rest",
            found=f"{experts} experts over efsdp {degrees.lent // degrees.ep} x ep {degrees.ep} = {degrees.lent} ranks: TorchTitan "
            "cuts each expert's matrices along their first dim over efsdp, roles the experts",
            needed="the same cut in both",
        )
    ]
