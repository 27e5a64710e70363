"""The requests of stages: each is planned as a model of its own for one microbatch, on the mesh without the stage axes."""

from __future__ import annotations

from dataclasses import replace

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.resolution.request import Request
from shardwright.core.stages.choice import Choice, choose
from shardwright.core.stages.submodel import program_table, stage_table
from shardwright.core.stages.units import Letter, units_of


def stage_axes(request: Request, mesh: Mesh) -> tuple[str, ...]:
    """The axes that divide the layers into stages."""
    return mesh.larger_than_one(request.layout.axes_with("stage", "residual"))


def chosen_stages(request: Request, mesh: Mesh) -> Choice | None:
    """The stages of a request, or why there are none; None where no axis divides the layers, and for a user's own program."""
    axes = stage_axes(request, mesh)
    if not axes or request.table.program != "ours":
        return None
    entries = [request.layout.entries[axis] for axis in axes]
    units = units_of(request.table, request.length, recomputed=request.remat == "full", ends=_ends(request, axes))
    return choose(
        units,
        ranks=mesh.size(axes),
        microbatches=request.microbatches,
        engine=request.engine,
        virtual=next((entry.virtual for entry in entries if entry.virtual), None),
        schedule=request.schedule or next((entry.schedule for entry in entries if entry.schedule), None),
        text=request.stages,
    )


def _ends(request: Request, axes: tuple[str, ...]) -> tuple[Letter, ...]:
    """The ends that a stage has. Where a stage axis has another role in one, all stages share in it."""
    letters: dict[Letter, str] = {"E": "embedding", "L": "logits"}
    return tuple(
        letter
        for letter, component in letters.items()
        if all(request.layout.role(axis, component) == "idle" for axis in axes)
    )


def stage_requests(request: Request, mesh: Mesh, choice: Choice) -> tuple[Request, ...]:
    """The request of each stage: what it computes, as a model of its own, for one microbatch."""
    return tuple(_alone(request, mesh, stage_table(request.table, stage)) for stage in choice.stages)


def held_requests(request: Request, mesh: Mesh, choice: Choice) -> tuple[Request, ...]:
    """The same for what the devices of each stage hold. PyTorch's ranks hold their stages. JAX has one program for all devices, in
    which arrays are equally large on all stages, and each device has both ends."""
    if request.engine == "torch":
        return stage_requests(request, mesh, choice)
    return tuple(
        _alone(request, mesh, program_table(request.table, choice.stages, ends=number < choice.ranks))
        for number in range(choice.num_stages)
    )


def _alone(request: Request, mesh: Mesh, table: ModelTable) -> Request:
    axes = stage_axes(request, mesh)
    kept = [axis for axis in mesh.names if axis not in axes]
    return replace(
        request,
        layout=_without(request.layout, axes),
        table=table,
        batch=max(1, request.batch // request.microbatches),
        microbatches=1,
        mesh_sizes={axis: mesh.size(axis) for axis in kept},
        devices=None,
        schedule=None,
        stages=None,
        # A stage has a part of the slice, whose collectives the compiler keeps.
        chip=request.chip and replace(request.chip, whole_slice=None),
    )


def _without(layout: Layout, axes: tuple[str, ...]) -> Layout:
    return replace(
        layout,
        mesh={axis: entry for axis, entry in layout.mesh.items() if axis not in axes},
        entries={axis: entry for axis, entry in layout.entries.items() if axis not in axes},
        rules=tuple(replace(rule, axes=tuple(axis for axis in rule.axes if axis not in axes)) for rule in layout.rules),
    )
