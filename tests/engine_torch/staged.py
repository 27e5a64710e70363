"""Models in stages for tests, and one device with the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.cli.typed.values import mesh_sizes
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.reading import read_layout
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.recipes.presets import preset
from shardwright.core.resolution.request import Request
from shardwright.files import parse_yaml
from tests.engine_jax.steps import Case, plan_of

INSIDE = {
    "fsdp": "fsdp: fsdp",
    "replicas": "data: data",
    "hsdp": "data: data\n  fsdp: fsdp",
    "zero1": "data: {elsewhere: data, optimizer: shard}\n  fsdp: fsdp",
    "zero2": "data: {elsewhere: data, optimizer: shard, gradients: shard}\n  fsdp: fsdp",
    "tp": "fsdp: fsdp\n  tensor: {elsewhere: tensor, sequence_parallel: true}",
    "tp-whole-rows": "fsdp: fsdp\n  tensor: tensor",
    "cp": "fsdp: fsdp\n  context: context",
    "ep": "fsdp: fsdp\n  expert: {elsewhere: fsdp, moe: expert}",
    "ep-tp": "fsdp: fsdp\n  expert: {elsewhere: fsdp, moe: expert}\n  tensor: {elsewhere: tensor, sequence_parallel: true}",
    "ep-nodes": "fsdp: fsdp\n  node: {elsewhere: fsdp, moe: expert}\n  expert: {elsewhere: fsdp, moe: expert}\nmove: {moe: two-hops}",
    "ep-as-cp": "fsdp: fsdp\n  expert: {elsewhere: context, moe: expert}",
}
"""Roles inside of each stage."""

WIDE = {"weights_dtype": "bfloat16", "gradients_dtype": "float32", "master_dtype": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A model in stages. ``inside``: of ``INSIDE``; ``mesh``, ``settings``: as on the command line; ``move``: how attention moves;
    ``ends``: roles of the stage axis at ends that all stages share. ``recipe``: a preset, or none. ``wide``: weights in bfloat16 with gradients and master weights in float32."""

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
    recipe: str = ""
    ends: str = ""
    wide: bool = False
    loss_chunks: int = 1

    def __str__(self) -> str:
        words = [self.model, self.schedule, self.mesh, f"{self.microbatches} microbatches", self.stages or ""]
        words += [self.inside if self.inside != "fsdp" else "", self.settings, self.recipe]
        words += [self.ends, "wide" if self.wide else ""]
        words += [f"{self.loss_chunks} chunks of the loss" if self.loss_chunks > 1 else ""]
        words += [self.remat if self.remat != "full" else "", self.move if self.move != "gather" else ""]
        return " ".join(word for word in words if word)

    @property
    def alone(self) -> Case:
        return Case(model=self.model, layout="fsdp", mesh="fsdp=1", rows=self.rows, settings=self.settings)

    @property
    def num_ranks(self) -> int:
        return plan_in_stages(self).mesh.num_devices


def layout_of(case: Staged, stage: str = "stage: stage") -> Layout:
    """``stage``: the entry of the stage axis, if there is one."""
    axes = [f"{axis}: {size}" for axis, size in mesh_sizes(case.mesh).items() if stage or axis != "stage"]
    move = "" if case.move == "gather" else f"move: {{attention: {case.move}}}\n"
    text = f"name: staged\nmesh: {{{', '.join(axes)}}}\nroles:\n  {stage}\n  {INSIDE[case.inside]}\n{move}"
    return read_layout(parse_yaml(text, "staged.yaml"))


def layout_in_stages(case: Staged) -> Layout:
    layout = layout_of(case, f"stage: {{elsewhere: stage, {case.ends}}}" if case.ends else "stage: stage")
    virtual = None if case.stages is None else (case.stages.count("|") + 1) // mesh_sizes(case.mesh)["stage"]
    entry = replace(layout.entries["stage"], virtual=virtual)
    return replace(layout, entries={**layout.entries, "stage": entry})


def plan_in_stages(case: Staged) -> Plan:
    """The plan of a case on PyTorch, which has no errors."""
    request = _request(case, layout_in_stages(case))
    return _planned(replace(request, schedule=case.schedule, stages=case.stages))


def plan_without_stages(case: Staged) -> Plan:
    """The same layers, microbatches and roles on the mesh without the stage axis: every rank has all layers."""
    return _planned(_request(case, layout_of(case, stage="")))


def _request(case: Staged, layout: Layout) -> Request:
    return replace(
        plan_of(case.alone).request,
        engine="torch",
        layout=layout,
        mesh_sizes={axis: size for axis, size in mesh_sizes(case.mesh).items() if axis in layout.entries},
        microbatches=case.microbatches,
        remat=case.remat,
        precision=preset(case.recipe) if case.recipe else None,
        loss_chunks=case.loss_chunks,
        **(WIDE if case.wide else {}),
    )


def _planned(request: Request) -> Plan:
    plan = make_plan(request)
    assert not plan.errors, plan.errors
    return plan
