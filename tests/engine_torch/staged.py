"""Models in stages for tests, and one device with the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.files import parse_yaml
from tests.engine_jax.steps import Case, plan_of

INSIDE = {
    "fsdp": "fsdp: fsdp",
    "hsdp": "data: data\n  fsdp: fsdp",
    "zero1": "data: {elsewhere: data, optimizer: shard}\n  fsdp: fsdp",
    "tp": "fsdp: fsdp\n  tensor: {elsewhere: tensor, sequence_parallel: true}",
    "tp-whole-rows": "fsdp: fsdp\n  tensor: tensor",
    "cp": "fsdp: fsdp\n  context: context",
    "ep": "fsdp: fsdp\n  expert: {elsewhere: fsdp, moe: expert}",
    "ep-as-cp": "fsdp: fsdp\n  expert: {elsewhere: context, moe: expert}",
}
"""Roles inside of each stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A model in stages. ``inside``: of ``INSIDE``; ``mesh``, ``settings``: as on the command line; ``move``: how attention moves."""

    model: str
    mesh: str
    microbatches: int
    schedule: str
    stages: str | None = None
    inside: str = "fsdp"
    settings: str = ""
    remat: str = "full"
    move: str = "gather"
    rows: int = 8

    def __str__(self) -> str:
        words = [self.model, self.schedule, self.mesh, f"{self.microbatches} microbatches", self.stages or ""]
        words += [self.inside if self.inside != "fsdp" else "", self.settings]
        words += [self.remat if self.remat != "full" else "", self.move if self.move != "gather" else ""]
        return " ".join(word for word in words if word)

    @property
    def alone(self) -> Case:
        return Case(model=self.model, layout="fsdp", mesh="fsdp=1", rows=self.rows, settings=self.settings)

    @property
    def num_ranks(self) -> int:
        return plan_in_stages(self).mesh.num_devices


def layout_in_stages(case: Staged) -> Layout:
    sizes = ", ".join(f"{axis}: {size}" for axis, size in mesh_sizes(case.mesh).items())
    move = "" if case.move == "gather" else f"move: {{attention: {case.move}}}\n"
    text = f"name: staged\nmesh: {{{sizes}}}\nroles:\n  stage: stage\n  {INSIDE[case.inside]}\n{move}"
    layout = read_layout(parse_yaml(text, "staged.yaml"))
    virtual = None if case.stages is None else (case.stages.count("|") + 1) // mesh_sizes(case.mesh)["stage"]
    entry = replace(layout.entries["stage"], virtual=virtual)
    return replace(layout, entries={**layout.entries, "stage": entry})


def plan_in_stages(case: Staged) -> Plan:
    """The plan of a case on PyTorch, which has no errors."""
    request = replace(
        plan_of(case.alone).request,
        engine="torch",
        layout=layout_in_stages(case),
        mesh_sizes=mesh_sizes(case.mesh),
        microbatches=case.microbatches,
        schedule=case.schedule,
        stages=case.stages,
        remat=case.remat,
    )
    plan = make_plan(request)
    assert not plan.errors, plan.errors
    return plan
