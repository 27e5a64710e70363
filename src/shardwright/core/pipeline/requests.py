"""The requests of stages: each is planned as a model of its own for one microbatch, on the mesh without the stage axes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from shardwright.core.findings.patterns import matches
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.wording import every
from shardwright.core.mesh.hops import AUTO
from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import ModelTable
from shardwright.core.policies.policy import gathering_again
from shardwright.core.recipes.recipe import Recipe
from shardwright.core.resolution.request import Request
from shardwright.core.stages.assignment import Stage
from shardwright.core.stages.choice import Choice, Fault, shared_out, without_stages
from shardwright.core.stages.submodel import program_table, stage_table
from shardwright.core.stages.units import Letter, units_of


def stage_axes(request: Request, mesh: Mesh) -> tuple[str, ...]:
    """The axes that divide the layers into stages."""
    return mesh.larger_than_one(request.layout.axes_with("stage", "residual"))


def chosen_stages(request: Request, mesh: Mesh) -> Choice | None:
    """The stages of a request, or why there are none; None where no axis divides the layers, and for a user's own program."""
    choice = declared_stages(request, mesh)
    # In one program arrays are equally large on all ranks, so that no assignment with as large a stage needs less.
    limit_bytes = request.chip.usable_bytes if request.chip and not request.properties.one_program else None
    return choice and shared_out(choice, request.stages, request.unit_costs, limit_bytes)


def declared_stages(request: Request, mesh: Mesh) -> Choice | None:
    """The same before the units are shared out."""
    axes = stage_axes(request, mesh)
    if not axes or request.table.owner != "ours":
        return None
    entries = [request.layout.entries[axis] for axis in axes]
    ends = ends_of_stages(request, axes)
    faults = (*_half_shared(request, ends), *_differing(request, axes))
    units = units_of(request.table, request.length, recomputed=request.remat == "full", ends=ends)
    choice = without_stages(
        units,
        ranks=mesh.size(axes),
        microbatches=request.microbatches,
        engine=request.engine,
        virtual=next((entry.virtual for entry in entries if entry.virtual), None),
        schedule=request.schedule or next((entry.schedule for entry in entries if entry.schedule), None),
        text=request.stages,
    )
    return replace(choice, faults=(*choice.faults, *faults)) if faults else choice


def _differing(request: Request, axes: Sequence[str]) -> Iterator[Fault]:
    """Several axes of stages are one pipeline, which has one schedule."""
    entries = {axis: request.layout.entries[axis] for axis in axes}
    found = [
        every([f"{name} {value} on '{axis}'" for axis, value in values.items()])
        for name in ("virtual", "schedule")
        if (values := {axis: value for axis, one in entries.items() if (value := getattr(one, name)) is not None})
        and len({*values.values()}) > 1
    ]
    if found:
        yield Fault(
            found=f"{'; '.join(found)}: the axes are one pipeline",
            needed="options on one of these axes",
            one_entry=True,
        )


def _half_shared(request: Request, ends: Sequence[Letter]) -> Iterator[Fault]:
    """A tied weight has one use on a stage and another on all of them: it would be sharded in two ways."""
    if len(ends) != 1:
        return
    own, other = ("embedding", "logits") if ends == ("E",) else ("logits", "embedding")
    for weight in request.table.weights:
        if weight.uses:
            yield Fault(
                found=f"'{weight.name}' is used in '{own}', which one stage has, and in '{other}', which all stages share",
                needed="both on all stages, or each on its own",
                other_ends=True,
            )


def ends_of_stages(request: Request, axes: tuple[str, ...]) -> tuple[Letter, ...]:
    """The ends that a stage has. Where a stage axis has another role in one, all stages share in it."""
    letters: dict[Letter, str] = {"E": "embedding", "L": "logits"}
    return tuple(
        letter
        for letter, component in letters.items()
        if all(request.layout.role(axis, component) == "idle" for axis in axes)
    )


def stage_requests(request: Request, mesh: Mesh, choice: Choice) -> tuple[Request, ...]:
    """The request of each stage: what it computes, as a model of its own, for one microbatch."""
    return requests_of(request, mesh, choice.stages)


def requests_of(request: Request, mesh: Mesh, stages: Iterable[Stage]) -> tuple[Request, ...]:
    """The same of any stages."""
    alone = _alone(request, mesh)
    return tuple(_of_table(alone, stage_table(request.table, stage)) for stage in stages)


def held_requests(request: Request, mesh: Mesh, choice: Choice) -> tuple[Request, ...]:
    """The same for what the devices of each stage hold on JAX: one program of all devices, in which arrays are equally large on all
    stages, and each device has both ends."""
    ends = ends_of_stages(request, stage_axes(request, mesh))
    alone = _alone(request, mesh)
    chunks = [
        _of_table(alone, program_table(request.table, choice.stages, ends=of_chunk))
        for of_chunk in (ends, ())[: choice.virtual]
    ]
    return tuple(chunks[0 if number < choice.ranks else 1] for number in range(choice.num_stages))


def _of_table(alone: Request, table: ModelTable) -> Request:
    """``alone`` for a part of its model."""
    return replace(alone, table=table, precision=recipe_of(alone, table))


def _alone(request: Request, mesh: Mesh) -> Request:
    """The request without its stages, for one microbatch."""
    axes = stage_axes(request, mesh)
    kept = [axis for axis in mesh.names if axis not in axes]
    return replace(
        request,
        layout=_without(request.layout, axes),
        batch=max(1, request.batch // request.microbatches),
        microbatches=1,
        mesh_sizes={axis: mesh.size(axis) for axis in kept},
        devices=None,
        schedule=None,
        stages=None,
        unit_costs=None,
        hops=AUTO,
        # In one program a live microbatch keeps activations alone: its weights are those of all others.
        remat=gathering_again(request.remat) if request.properties.one_program else request.remat,
        # A stage has a part of the slice, whose collectives the compiler keeps.
        chip=request.chip and replace(request.chip, whole_slice=None),
    )


def recipe_of(request: Request, table: ModelTable) -> Recipe | None:
    """The recipe for a part of the model: of its patterns those that match a weight there. A request has no others."""
    recipe = request.precision
    if recipe is None:
        return None

    def there(patterns: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(one for one in patterns if any(matches(weight.name, one) for weight in table.weights))

    return replace(recipe, high=there(recipe.high), quantized=there(recipe.quantized))


@lru_cache(maxsize=256)
def _without(layout: Layout, axes: tuple[str, ...]) -> Layout:
    return replace(
        layout,
        mesh={axis: entry for axis, entry in layout.mesh.items() if axis not in axes},
        entries={axis: entry for axis, entry in layout.entries.items() if axis not in axes},
        rules=tuple(replace(rule, axes=tuple(axis for axis in rule.axes if axis not in axes)) for rule in layout.rules),
    )
