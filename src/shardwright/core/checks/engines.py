"""SW415: what the engine of a plan does not run, with what it would run instead.

This is the only such list. An engine refuses what is listed here, and otherwise only what the machine alone can know.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce

from shardwright.core.checks.edits import (
    both,
    entry,
    named_roles,
    resized,
    rule,
    without,
    without_rule,
)
from shardwright.core.checks.engine_policies import policies
from shardwright.core.checks.engine_recipes import recipes
from shardwright.core.checks.engine_stages import (
    engines_that,
    some_stay_gathered,
    stages_of_one_program,
    stages_of_ranks,
)
from shardwright.core.checks.loss import without_chunks
from shardwright.core.checks.window import rows_beyond_the_window
from shardwright.core.findings.codes import NOT_RUN
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Rule
from shardwright.core.layout.roles import ROLES
from shardwright.core.layout.wording import every, others, product
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.fsdp_groups import WeightOfLayer, trained, weight_of_layer
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.resharding import WeightResharding, weight_reshardings


def not_run(plan: Plan) -> Iterator[Draft]:
    """Of a user's own program some engines only place the weights: they have no collective that could differ."""
    request, engine = plan.request, plan.request.properties
    ours = request.table.owner == "ours"
    yield from recipes(plan)
    yield from _updates(plan)
    yield from _kept_gathered(plan)
    yield from _dtypes(plan)
    yield from policies(plan)
    yield from without_chunks(plan)
    yield from rows_beyond_the_window(plan)
    if ours:
        yield from stages_of_one_program(plan) if engine.one_program else stages_of_ranks(plan)
    elif "own programs in stages" in engine.lacks:
        yield from _stages(plan)
    if ours or engine.trains_own_programs:
        yield from _slices(plan)
    yield from _chips(plan)
    if engine.gathers_once:
        yield from _differing_uses(plan)
    if "weights stored on several dims" in engine.lacks:
        yield from _other_dims(plan)


def _updates(plan: Plan) -> Iterator[Draft]:
    """Updates are sharded by our own training step. In stages some engines scatter gradients after the last microbatch only, others in
    each (``engine_stages.py``)."""
    layout, mesh = plan.request.layout, plan.mesh
    stages = any("stage" in layout.entries[axis].roles.values() for axis in mesh.larger_than_one(mesh.names))
    own, engine = plan.request.table.owner != "ours", plan.request.properties
    for axis in mesh.larger_than_one(mesh.names):
        one = layout.entries[axis]
        if own and one.optimizer:
            text = (
                f"it shards updates over {product(mesh, [axis])}, which {engine.title} does not do for your own program"
            )
            yield _without_options(plan, axis, text, optimizer=None, gradients=None)
        elif stages and one.gradients and "gradients scattered in stages" in engine.lacks:
            text = f"it scatters gradients over {product(mesh, [axis])} in each microbatch, which {engine.title} does not do beside pipeline stages"
            yield _without_options(plan, axis, text, gradients=None)


def _kept_gathered(plan: Plan) -> Iterator[Draft]:
    """Weights stay gathered where one step has all layers, and the engine gathers the weights themselves."""
    layout, mesh, request, engine = plan.request.layout, plan.mesh, plan.request, plan.request.properties
    why = {
        "beside pipeline stages": plan.pipeline is not None and "kept weights in stages" in engine.lacks,
        "beside pipeline stages for some weights of layers and not for others": some_stay_gathered(plan),
        "of codes, which the recipe gathers": request.precision is not None and request.precision.gather_quantized,
        "for your own program": request.table.owner != "ours" and "kept weights of own programs" in engine.lacks,
    }
    where = next((text for text, has in why.items() if has), None)
    for axis in mesh.larger_than_one(mesh.names) if where else ():
        if layout.entries[axis].keep_gathered:
            text = f"weights stay gathered over {product(mesh, [axis])}, which {engine.title} does not do {where}"
            yield _without_options(plan, axis, text, keep_gathered=None)


def _without_options(plan: Plan, axis: str, found: str, **options: None) -> Draft:
    finding = Finding(
        code=NOT_RUN,
        severity="error",
        where=f"option '{next(iter(options))}' of axis '{axis}'",
        position=plan.request.layout.entries[axis].position,
        found=found,
        needed="no such option; a plan with it can be read, compared and locked",
    )
    return Draft(finding=finding, candidates=(entry(plan, axis, **options),))


def _dtypes(plan: Plan) -> Iterator[Draft]:
    """Dtypes of gradients and of master weights, where the engine does not have them."""
    request, mesh, engine = plan.request, plan.mesh, plan.request.properties
    stages = "dtypes of gradients in stages" in engine.lacks and any(
        "stage" in request.layout.entries[a].roles.values() for a in mesh.larger_than_one(mesh.names)
    )
    given = [name for name in ("gradients_dtype", "master_dtype") if getattr(request, name) is not None]
    where = "for your own program" if request.table.owner != "ours" else "beside pipeline stages yet" if stages else ""
    for name in given if where else ():
        flag = name.replace("_", "-")
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where=f"--{flag}",
            found=f"{getattr(request, name)}, which {engine.title} does not do {where}",
            needed="no such option",
        )
        yield Draft(finding=finding, candidates=(without(flag),))
    wider = "gradients wider than gathered weights"
    if wider in engine.lacks and request.summed_in != request.weights_dtype and not where:
        gathered = [
            one for row in trained(request, plan.weights) if (one := weight_of_layer(request, mesh, row, None)).gathered
        ]
        if gathered:
            finding = Finding(
                code=NOT_RUN,
                severity="error",
                where="--gradients-dtype",
                found=f"gradients in {request.summed_in} of {others([one.weight for one in gathered], 'weight')} in "
                f"{request.weights_dtype}; fully_shard keeps the gradients of what it gathers in the dtype at rest",
                needed="weights in the dtype of their gradients, which are gathered in the dtype of the computation all the same; or an "
                "axis that replicates them",
            )
            wide = Candidate(
                text=f"--weights-dtype {request.summed_in} without --master-dtype",
                edit=lambda request: replace(request, weights_dtype=request.summed_in, master_dtype=None),
            )
            other_engines = engines_that(lambda other: wider not in other.lacks)
            yield Draft(finding=finding, candidates=(wide, without("gradients-dtype"), *other_engines))


def _stages(plan: Plan) -> Iterator[Draft]:
    """Stages of a user's own program: they are planned, priced and locked, but no schedule of it is known."""
    layout, mesh, request = plan.request.layout, plan.mesh, plan.request
    for axis in mesh.larger_than_one(mesh.names):
        one = layout.entries[axis]
        if "stage" not in one.roles.values():
            continue
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where=f"axis '{axis}' of layout '{layout.name}'",
            position=one.position,
            found=f"{product(mesh, [axis])} splits the layers into pipeline stages, which {request.properties.title} does not run of your own program",
            needed="no stages; a plan with stages can be read, compared and locked",
        )
        given = [name for name in ("schedule", "stages") if getattr(request, name) is not None]
        fixes = [reduce(both, map(without, given), candidate) for candidate in resized(plan, axis, 1)]
        yield Draft(finding=finding, candidates=tuple(fixes))


def _slices(plan: Plan) -> Iterator[Draft]:
    """Rules that keep a minor axis of a dim and leave out a more major one. A device takes its slice over the left-out axis
    from what it holds, and it does not hold that slice where only minor axes shard the weight."""
    layout, mesh = plan.request.layout, plan.mesh
    for one in layout.rules:
        sharding = mesh.larger_than_one(
            axis for axis in mesh.names if one.logical_axis in ROLES[layout.role(axis, one.component)].weights
        )
        kept = tuple(axis for axis in sharding if axis in one.axes)
        if kept == sharding[: len(kept)]:
            continue
        first = next(axis for axis in sharding if axis not in one.axes)
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where=f"the rule for '{one.logical_axis}' in '{one.component}'",
            position=one.position,
            found=f"it keeps '{kept[-1]}' and leaves out '{first}', which precedes it in the mesh: a device would not hold "
            f"the '{one.logical_axis}' that it computes with",
            needed=f"a rule that keeps {every(map(repr, sharding))}, the first of them, or none",
        )
        yield Draft(finding=finding, candidates=tuple(_major_runs(one, sharding)))


def _major_runs(one: Rule, sharding: tuple[str, ...]) -> Iterator[Candidate]:
    """The rule with all of the axes that shard, then without the most minor one, and so on."""
    others_of_it = tuple(axis for axis in one.axes if axis not in sharding)
    for kept in range(len(sharding), -1, -1):
        yield rule(one.component, one.logical_axis, (*sharding[:kept], *others_of_it))


def _chips(plan: Plan) -> Iterator[Draft]:
    chip, engine = plan.request.chip, plan.request.properties
    if chip is not None and chip.accelerator not in engine.accelerators:
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where="--chips",
            found=f"{chip.name}, which {engine.title} does not train on",
            needed="GPUs, as h100:8x8, or no chips",
        )
        yield Draft(finding=finding, candidates=engines_that(lambda other: chip.accelerator in other.accelerators))


def _differing_uses(plan: Plan) -> Iterator[Draft]:
    """Tied weights whose two uses differ, where a weight is gathered once for both uses, which must have the same specs."""
    framework, other_engines = plan.request.properties.framework, engines_that(lambda other: not other.gathers_once)
    for row in plan.weights:
        (own, first), *uses = weight_reshardings(plan.request, plan.mesh, row).items()
        for component, other in uses:
            if difference := _difference(own, first, component, other):
                finding = Finding(
                    code=NOT_RUN,
                    severity="error",
                    tensor=row.name,
                    where=f"{row.name} in '{own}' and '{component}'",
                    found=f"{difference}; {framework} gathers a weight once, for both uses",
                    needed="the same spec and the same gradient axes in both",
                )
                yield Draft(finding=finding, candidates=(*_one_role(plan, own, component), *other_engines))


def _difference(own: str, first: WeightResharding, component: str, other: WeightResharding) -> str:
    if first.operand != other.operand or first.gathered != other.gathered:
        by_operand = first.operand != other.operand
        specs = (first.operand, other.operand) if by_operand else (first.gathered, other.gathered)
        return f"it is {specs[0]} in '{own}' and {specs[1]} in '{component}'"
    if first.replicated_gradient != other.replicated_gradient:
        axes = sorted({*first.replicated_gradient} ^ {*other.replicated_gradient})
        return f"its gradient is partial over {every(map(repr, axes))} from one use and replicated from the other"
    return ""


def _one_role(plan: Plan, own: str, component: str) -> Iterator[Candidate]:
    """Each axis with different roles in the two components, with the same role in both; then rules of either removed."""
    layout = plan.request.layout
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        one = layout.entries[axis]
        for taken, given in ((own, component), (component, own)):
            if one.roles[own] != one.roles[component]:
                yield entry(plan, axis, named={**named_roles(one), given: one.roles[taken]})
    for one in layout.rules:
        if one.component in (own, component):
            yield without_rule(one.component, one.logical_axis)


def _other_dims(plan: Plan) -> Iterator[Draft]:
    """Weights that ``fully_shard`` cannot store: it shards one dim over all gathered axes as one, which divide it where it is not dim 0. Of codes
    dim 0 alone is gathered."""
    found: dict[tuple[str, str], list[WeightOfLayer]] = {}
    other_engines = engines_that(lambda other: "weights stored on several dims" not in other.lacks)
    for row in trained(plan.request, plan.weights):
        one = weight_of_layer(plan.request, plan.mesh, row, None)
        if _is_stored(plan, one):
            continue
        for axis in one.gathered:
            if dim := one.at_rest.dim_of(axis):
                found.setdefault((axis, one.at_rest.dims[dim].logical_axis), []).append(one)
    for (axis, name), weights in found.items():
        one = weights[0]
        dim = one.at_rest.dim_of(axis)
        assert dim
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            tensor=one.weight,
            where=f"axis '{axis}' on '{name}' of {one.weight}",
            position=plan.request.layout.entries[axis].position,
            notation=str(one.at_rest),
            mark=place_in(one.at_rest, dim),
            found=f"it shards {others([w.weight for w in weights], 'weight')} at rest on dim {dim} of PyTorch's shape, and "
            f"{_stores(one)}",
            needed=f"'{one.at_rest.dims[0].logical_axis}', which is dim 0",
        )
        yield Draft(finding=finding, candidates=(*_first_dims(plan, axis, name, weights), *other_engines))


def _is_stored(plan: Plan, one: WeightOfLayer) -> bool:
    """Whether all gathered axes shard one dim, equally if it is not dim 0."""
    dims = {one.at_rest.dim_of(axis) for axis in one.gathered}
    if dims <= {0}:
        return True
    size = one.shape[one.storage_dim]
    return len(dims) == 1 and not one.of_codes and size % plan.mesh.size(one.at_rest.dims[one.storage_dim].axes) == 0


def _stores(one: WeightOfLayer) -> str:
    """What PyTorch's ranks do with such a weight."""
    return (
        "of codes dim 0 is gathered"
        if one.of_codes
        else "fully_shard shards dim 0, or one that all gathered axes divide"
    )


def _first_dims(plan: Plan, axis: str, name: str, weights: list[WeightOfLayer]) -> Iterator[Candidate]:
    layout = plan.request.layout
    if isinstance(layout.entries[axis].weights, tuple):
        yield entry(plan, axis, weights=None)
    for one in layout.rules:
        if one.logical_axis == name and axis in one.axes and any(one.component == w.component for w in weights):
            yield without_rule(one.component, name)
