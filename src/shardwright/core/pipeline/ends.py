"""The ends that all stages share: those in which the stage axes have another role than in the layers.

| what | how |
|---|---|
| storage, use and reductions of their weights | as that role says, on every device: a plan of a model that has no layers |
| the residual stream | one stage has it, behind its last layer for the logits; the others have zeros, and their sum is what all need. Its cotangent reaches the embedding in the same way |
| when | all stages compute a shared end together, one microbatch after the other, in addition to the timetable |
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from shardwright.core.layout.layout import Layout
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.names import STREAM
from shardwright.core.pipeline.requests import ends_of_stages, recipe_of, stage_axes
from shardwright.core.plan.memory import microbatch_bytes
from shardwright.core.plan.plan import Phase, Plan, PlannedCollective
from shardwright.core.plan.resharding import weight_reshardings
from shardwright.core.resolution.request import Request
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.planned import SharedEnds, work_of
from shardwright.core.stages.submodel import stage_table
from shardwright.core.stages.units import Letter, units_of

ENDS: tuple[Letter, ...] = ("E", "L")


def shared_ends(request: Request, mesh: Mesh) -> tuple[Letter, ...]:
    """The ends that all stages share."""
    own = ends_of_stages(request, stage_axes(request, mesh))
    return tuple(letter for letter in ENDS if letter not in own)


def ends_request(request: Request, mesh: Mesh) -> Request | None:
    """The request of the shared ends, on all devices and for one microbatch; None where each end has a stage."""
    shared = shared_ends(request, mesh)
    if not shared:
        return None
    none = Stage(layers=range(0), embedding="E" in shared, logits="L" in shared)
    table = stage_table(request.table, none)
    return replace(
        request,
        layout=_without_layers(request.layout, stage_axes(request, mesh)),
        table=table,
        precision=recipe_of(request, table),
        batch=max(1, request.batch // request.microbatches),
        microbatches=1,
        schedule=None,
        stages=None,
        unit_costs=None,
    )


@lru_cache(maxsize=256)
def _without_layers(layout: Layout, axes: tuple[str, ...]) -> Layout:
    """The layout where there are no layers: the stage axes have nothing to divide."""
    entries = {
        axis: replace(
            layout.entries[axis],
            roles={name: "idle" if role == "stage" else role for name, role in layout.entries[axis].roles.items()},
            virtual=None,
            schedule=None,
        )
        for axis in axes
    }
    return replace(layout, entries={**layout.entries, **entries})


def planned_ends(request: Request, mesh: Mesh, ends: Plan, gathered_bytes: int) -> SharedEnds:
    """What every device has and needs of the shared ends. ``ends``: their plan; ``gathered_bytes``: what their weights take that stay
    gathered."""
    letters = shared_ends(request, mesh)
    units = units_of(request.table, request.length, recomputed=False, ends=letters)
    ranks = mesh.size(stage_axes(request, mesh))
    saved, working = microbatch_bytes(ends.request, ends.mesh, ends.tensors)
    memory = ends.memory
    return SharedEnds(
        letters="".join(letters),
        stored_bytes=memory.state_bytes + memory.gradients_bytes,
        working_bytes=saved + working,
        gathered_bytes=gathered_bytes,
        work={kind: flops / ranks for kind, flops in work_of([u for u in units if u.layer is None]).items()},
    )


def with_sums(request: Request, mesh: Mesh, ends: Plan) -> Plan:
    """The plan of the shared ends with the sums by which all stages have the residual stream, or its cotangent, of one of them."""
    phases: dict[Letter, Phase] = {"E": "backward", "L": "forward"}
    sums = (
        PlannedCollective(
            component="residual",
            phase=phases[letter],
            kind="all-reduce",
            axes=stage_axes(request, mesh),
            bytes_per_device=ends.by_name[STREAM].bytes_per_device,
            count_per_step=1,
            tensors=(STREAM,),
        )
        for letter in shared_ends(request, mesh)
    )
    return replace(ends, collectives=(*(_of_both_ends(ends, one) for one in ends.collectives), *sums))


def _of_both_ends(ends: Plan, one: PlannedCollective) -> PlannedCollective:
    """What is done of a tied weight for each end, where a model without stages does it once for both uses: PyTorch reduces its gradient in the
    backward pass of each, and JAX gathers it for each too."""
    table, rows = ends.request.table, [name for name in one.tensors if name in ends.by_name]
    uses = [
        weight_reshardings(ends.request, ends.mesh, ends.by_name[name]).values()
        for name in rows
        if ends.by_name[name].kind == "weight" and table.weight(name).uses
    ]
    again = [
        ("backward", "reduce-scatter"),
        *([] if ends.request.properties.gathers_once else [("forward", "all-gather")]),
    ]
    twice = any(len(set(own)) == 1 for own in uses) and (one.phase, one.kind) in again
    return replace(one, count_per_step=2 * one.count_per_step) if twice else one
