"""SW102: an axis that would shard two dims of one tensor, by a rule or by the role table."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import rule, without_rule
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.layout import Rule
from shardwright.core.layout.roles import ROLES
from shardwright.core.layout.wording import bytes_text, counted, either, others, product
from shardwright.core.mesh.notation import place_in
from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan, TensorPlan


def two_dims(plan: Plan) -> Iterator[Draft]:
    """Each axis and pair of dims, once, with the largest weight or the first activation that has both."""
    groups: dict[tuple[str, str, str, str], list[TensorPlan]] = {}
    for tensor in plan.weights:
        for request in tensor.axis_requests:
            if request.refused == "taken":
                dim = tensor.spec.dim_of(request.axis)
                assert dim is not None
                has = tensor.spec.dims[dim].logical_axis
                groups.setdefault((tensor.component, request.axis, has, request.tried[0]), []).append(tensor)
            elif request.granted is not None and not ROLES[request.role].stores:
                for wants in request.tried[1:]:
                    groups.setdefault((tensor.component, request.axis, request.granted, wants), []).append(tensor)
    for tensor in plan.activations:
        for axis in plan.mesh.names:
            names = [
                n
                for n in plan.request.layout.dims_sharded_by(axis, tensor.component)
                if n in tensor.in_use.logical_axes
            ]
            for wants in names[1:]:
                key = (tensor.component, axis, names[0], wants)
                if key not in groups:
                    groups[key] = [tensor]
    for (component, axis, has, wants), tensors in groups.items():
        yield _draft(plan, component, axis, has, wants, tensors)


def _draft(plan: Plan, component: str, axis: str, has: str, wants: str, tensors: list[TensorPlan]) -> Draft:
    layout = plan.request.layout
    tensor = max(tensors, key=lambda t: t.bytes_per_device * t.num)
    rules = {r.logical_axis: r for r in layout.rules if r.component == component and axis in r.axes}
    requesting = rules.get(wants) or rules.get(has)
    second = f"a rule gives it '{wants}' as well" if wants in rules else f"the same role shards '{wants}'"
    size = dict(zip(tensor.in_use.logical_axes[-len(tensor.shape) :], tensor.shape, strict=True))[wants]
    start, stop = place_in(tensor.spec, tensor.spec.logical_axes.index(wants))
    finding = Finding(
        code="SW102",
        severity="error",
        tensor=tensor.name,
        where=f"axis '{axis}' in '{component}', {tensor.name}",
        position=requesting.position if requesting else layout.entries[axis].position,
        notation=_with(tensor.spec, wants, axis),
        mark=(start, stop + len(axis) + 1),
        found=f"'{axis}' shards '{has}' of {others([t.name for t in tensors], 'tensor')}, and {second}",
        needed=f"one dim for {product(plan.mesh, [axis])}: {either([repr(has), repr(wants)])}",
        cost=f"'{wants}' ({counted(size, wants)}) is not sharded; {bytes_text(tensor.bytes_per_device)} of the tensor on each "
        "device",
    )
    return Draft(finding=finding, candidates=tuple(_one_of_them(rules, component, axis, has, wants)))


def _one_of_them(rules: dict[str, Rule], component: str, axis: str, has: str, wants: str) -> Iterator[Candidate]:
    for name in (wants, has):
        if name in rules:
            left = tuple(a for a in rules[name].axes if a != axis)
            yield rule(component, name, left) if left else without_rule(component, name)


def _with(spec: Spec, wants: str, axis: str) -> str:
    return " ".join(f"{dim}/{axis}" if dim.logical_axis == wants else str(dim) for dim in spec.dims)
