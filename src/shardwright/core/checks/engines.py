"""SW415: what the engine of a plan does not run, with what would be run in its place.

The one list of them: an engine refuses what stands here and no more, but for what only the machine can know.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry, named_roles, option, resized, rule, without_rule
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

ON_JAX = option("engine", "jax")


def not_run(plan: Plan) -> Iterator[Draft]:
    """Of a user's own program JAX lays out the weights and runs nothing; PyTorch gathers them and sums their gradients."""
    if plan.request.engine == "jax":
        if plan.request.table.program == "ours":
            yield from _stages(plan)
            yield from _slices(plan)
    else:
        yield from _stages(plan)
        yield from _slices(plan)
        yield from _chips(plan)
        yield from _two_ways(plan)
        yield from _other_dims(plan)


def _stages(plan: Plan) -> Iterator[Draft]:
    """Stages are planned, priced and locked; no engine has their schedule."""
    layout, mesh = plan.request.layout, plan.mesh
    for axis in mesh.larger_than_one(mesh.names):
        one = layout.entries[axis]
        if "stage" not in one.roles.values():
            continue
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where=f"axis '{axis}' of layout '{layout.name}'",
            position=one.position,
            found=f"{product(mesh, [axis])} cuts the layers into pipeline stages, which neither engine runs yet",
            needed="no stages; a plan of them can be read, compared and locked",
        )
        yield Draft(finding=finding, candidates=tuple(resized(plan, axis, 1)))


def _slices(plan: Plan) -> Iterator[Draft]:
    """Of what a rule leaves whole a device takes one slice; that is none where only minor axes cut the rest."""
    layout, mesh = plan.request.layout, plan.mesh
    for one in layout.rules:
        cutting = mesh.larger_than_one(
            axis for axis in mesh.names if one.logical_axis in ROLES[layout.role(axis, one.component)].weights
        )
        kept = tuple(axis for axis in cutting if axis in one.axes)
        if kept == cutting[: len(kept)]:
            continue
        first = next(axis for axis in cutting if axis not in one.axes)
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where=f"the rule for '{one.logical_axis}' in '{one.component}'",
            position=one.position,
            found=f"it keeps '{kept[-1]}' and leaves out '{first}', which stands before it in the mesh: the "
            f"'{one.logical_axis}' that a device computes with would be no part of those that it holds",
            needed=f"a rule that keeps {every(map(repr, cutting))}, the first of them, or none",
        )
        yield Draft(finding=finding, candidates=tuple(_whole_runs(one, cutting)))


def _whole_runs(one: Rule, cutting: tuple[str, ...]) -> Iterator[Candidate]:
    """The rule with the most of the axes that cut, major first, then with fewer."""
    others_of_it = tuple(axis for axis in one.axes if axis not in cutting)
    for kept in range(len(cutting), -1, -1):
        yield rule(one.component, one.logical_axis, (*cutting[:kept], *others_of_it))


def _chips(plan: Plan) -> Iterator[Draft]:
    chip = plan.request.chip
    if chip is not None and chip.accelerator == "TPU":
        finding = Finding(
            code=NOT_RUN,
            severity="error",
            where="--chips",
            found=f"{chip.name}, which the PyTorch engine does not train on",
            needed="GPUs, as h100:8x8, or no chips",
        )
        yield Draft(finding=finding, candidates=(ON_JAX,))


def _two_ways(plan: Plan) -> Iterator[Draft]:
    """PyTorch gathers a weight that has two uses once, and so must be the same thing in both."""
    for row in plan.weights:
        (own, way), *uses = weight_reshardings(plan.request, plan.mesh, row).items()
        for component, other in uses:
            if difference := _difference(own, way, component, other):
                finding = Finding(
                    code=NOT_RUN,
                    severity="error",
                    tensor=row.name,
                    where=f"{row.name} in '{own}' and '{component}'",
                    found=f"{difference}; PyTorch gathers a weight once, for both uses",
                    needed="the same part of it in both",
                )
                yield Draft(finding=finding, candidates=(*_one_role(plan, own, component), ON_JAX))


def _difference(own: str, way: WeightResharding, component: str, other: WeightResharding) -> str:
    if way.operand != other.operand or way.gathered != other.gathered:
        specs = (way.operand, other.operand) if way.operand != other.operand else (way.gathered, other.gathered)
        return f"it is {specs[0]} in '{own}' and {specs[1]} in '{component}'"
    if way.replicated_gradient != other.replicated_gradient:
        parts = sorted({*way.replicated_gradient} ^ {*other.replicated_gradient})
        return f"its gradient is in parts over {every(map(repr, parts))} from one use and whole from the other"
    return ""


def _one_role(plan: Plan, own: str, component: str) -> Iterator[Candidate]:
    """Each axis that has another role in the two, with the role that it has in either."""
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
    """``fully_shard`` cuts dim 0, over all axes that a weight is gathered over as one."""
    found: dict[tuple[str, str], list[WeightOfLayer]] = {}
    for row in trained(plan.request, plan.weights):
        one = weight_of_layer(plan.request, plan.mesh, row, None)
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
            found=f"it stores {others([w.weight for w in weights], 'weight')} on dim {dim} as PyTorch keeps it, and "
            f"fully_shard cuts dim 0",
            needed=f"'{one.at_rest.dims[0].logical_axis}', which is dim 0",
        )
        yield Draft(finding=finding, candidates=(*_first_dims(plan, axis, name, weights), ON_JAX))


def _first_dims(plan: Plan, axis: str, name: str, weights: list[WeightOfLayer]) -> Iterator[Candidate]:
    layout = plan.request.layout
    if isinstance(layout.entries[axis].weights, tuple):
        yield entry(plan, axis, weights=None)
    for one in layout.rules:
        if one.logical_axis == name and axis in one.axes and any(one.component == w.component for w in weights):
            yield without_rule(one.component, name)
