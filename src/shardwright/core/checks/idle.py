"""SW103: an axis larger than 1 that does nothing, and what an axis repeats where its role left it idle."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry, named_roles, resized
from shardwright.core.checks.tensors import device_bytes, largest_first, shards
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.roles import COMPONENTS, SEQUENCE_PARALLEL
from shardwright.core.layout.wording import bytes_text, count, every, product
from shardwright.core.mesh.notation import place_in
from shardwright.core.plan.plan import Plan, TensorPlan


def idle_axes(plan: Plan) -> Iterator[Draft]:
    """One draft for each axis that does nothing at all, and otherwise for each part in which it does nothing."""
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        declared = plan.request.layout.entries[axis]
        if shards(plan, axis):
            yield from _in_components(plan, axis)
        elif any(_cuts_what_is_not_listed(plan, axis, component) for component in plan.request.table.components):
            continue
        elif set(declared.roles.values()) != {"idle"} or declared.elsewhere != "idle":
            yield _nowhere(plan, axis)


def _nowhere(plan: Plan, axis: str) -> Draft:
    layout = plan.request.layout
    declared = layout.entries[axis]
    roles = sorted({role for role in declared.roles.values() if role != "idle"})
    parts = every(repr(c) for c in COMPONENTS if declared.roles[c] != "idle")
    devices, ruled = plan.mesh.num_devices, _rules_leave_it_out(plan, axis)
    finding = Finding(
        code="SW103",
        severity="info" if ruled else "error",
        where=f"axis '{axis}'",
        position=declared.position,
        found=f"{product(plan.mesh, [axis])}, with role {every(repr(r) for r in roles)} in {parts} alone, cuts nothing "
        f"of {plan.request.table.name}",
        needed="nothing: the rules say so"
        if ruled
        else "an axis of size 1, a role that cuts something of this model, or 'idle'",
        cost=f"{count(devices, 'device')} do the work of {devices // plan.mesh.size(axis)}",
    )
    return Draft(finding=finding, candidates=(*resized(plan, axis, 1), entry(plan, axis, elsewhere="fsdp")))


def _in_components(plan: Plan, axis: str) -> Iterator[Draft]:
    layout, present = plan.request.layout, plan.request.table.components
    declared = layout.entries[axis]
    left_idle: dict[str, list[TensorPlan]] = {}
    for component in (c for c in COMPONENTS if c in present):
        role = declared.roles[component]
        tensors = [t for t in plan.tensors if t.component == component]
        if role != "idle":
            if not shards(plan, axis, component) and not _cuts_what_is_not_listed(plan, axis, component):
                yield _role_cuts_nothing(plan, axis, component, role)
        elif component not in declared.declared and declared.elsewhere not in (None, "idle"):
            left_idle[component] = tensors
    stream = left_idle.pop(SEQUENCE_PARALLEL[0], None) if declared.elsewhere == "tensor" else None
    if stream is not None:
        yield _left_idle(plan, axis, {SEQUENCE_PARALLEL[0]: stream})
    if left_idle:
        yield _left_idle(plan, axis, left_idle)


def _cuts_what_is_not_listed(plan: Plan, axis: str, component: str) -> bool:
    """Whether an axis cuts the rows or tokens of a component of which a user's own table lists weights alone: it has those
    activations only whose layout was asked for."""
    table = plan.request.table
    listed = table.program == "ours" or any(row.component == component for row in table.activations)
    return not listed and not {"batch", "length"}.isdisjoint(plan.request.layout.dims_sharded_by(axis, component))


def _role_cuts_nothing(plan: Plan, axis: str, component: str, role: str) -> Draft:
    layout = plan.request.layout
    ruled = _rules_leave_it_out(plan, axis, component)
    finding = Finding(
        code="SW103",
        severity="info" if ruled else "error",
        where=f"axis '{axis}' in '{component}'",
        position=layout.entries[axis].position,
        found=f"role '{role}' of {product(plan.mesh, [axis])} cuts no tensor of '{component}' in {plan.request.table.name}",
        needed="nothing: the rule says so" if ruled else "a role that cuts something there, or 'idle'",
        cost=f"'{component}' is computed {plan.mesh.size(axis)} times over",
    )
    named = {**named_roles(layout.entries[axis]), component: "idle"}
    return Draft(finding=finding, candidates=(entry(plan, axis, named=named),))


def _rules_leave_it_out(plan: Plan, axis: str, component: str | None = None) -> bool:
    """Whether an axis would cut weights, of one component or of any, and rules alone keep it from that."""
    return any(
        asked.axis == axis and asked.refused == "left-out"
        for tensor in plan.weights
        if component in (None, tensor.component)
        for asked in tensor.axis_requests
    )


def _left_idle(plan: Plan, axis: str, parts: dict[str, list[TensorPlan]]) -> Draft:
    """What a role repeats where it has nothing to cut. The largest tensor is shown."""
    layout = plan.request.layout
    declared = layout.entries[axis]
    tensors = [t for rows in parts.values() for t in rows]
    tensor = largest_first(tensors)[0]
    held = sum(device_bytes(t) for t in tensors)
    component, logical_axis = SEQUENCE_PARALLEL
    parallel = declared.elsewhere == "tensor" and component in parts and logical_axis in tensor.spec.logical_axes
    whole = (0, len(str(tensor.spec)))
    finding = Finding(
        code="SW103",
        severity="info",
        tensor=tensor.name,
        where=f"axis '{axis}' in {every(repr(c) for c in parts)}",
        position=declared.position,
        notation=str(tensor.spec),
        mark=place_in(tensor.spec, tensor.spec.logical_axes.index(logical_axis)) if parallel else whole,
        found=f"idle there: role '{declared.elsewhere}' has nothing to cut",
        needed="nothing: 'elsewhere' leaves it idle where its role has nothing to cut",
        cost=f"{bytes_text(held)} of weights and activations of all layers a device, the same over "
        f"{product(plan.mesh, [axis])}; {bytes_text(device_bytes(tensor), like=held)} of it are {tensor.name}",
    )
    return Draft(finding=finding, candidates=(entry(plan, axis, sequence_parallel=True),) if parallel else ())
