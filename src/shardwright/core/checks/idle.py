"""SW103: an axis larger than 1 that shards nothing, and what an axis repeats where its role leaves it idle."""

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
    """One draft for each axis that shards nothing at all, and otherwise for each component in which it shards nothing."""
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        declared = plan.request.layout.entries[axis]
        if shards(plan, axis):
            yield from _in_components(plan, axis)
        elif any(_shards_unlisted(plan, axis, component) for component in plan.request.table.components):
            continue
        elif set(declared.roles.values()) != {"idle"} or declared.elsewhere != "idle":
            yield _nowhere(plan, axis)


def _nowhere(plan: Plan, axis: str) -> Draft:
    layout = plan.request.layout
    declared = layout.entries[axis]
    roles = sorted({role for role in declared.roles.values() if role != "idle"})
    components = every(repr(c) for c in COMPONENTS if declared.roles[c] != "idle")
    devices, ruled = plan.mesh.num_devices, _rules_leave_it_out(plan, axis)
    finding = Finding(
        code="SW103",
        severity="info" if ruled else "error",
        where=f"axis '{axis}'",
        position=declared.position,
        found=f"{product(plan.mesh, [axis])}, with role {every(repr(r) for r in roles)} in {components} alone, shards "
        f"nothing of {plan.request.table.name}",
        needed="nothing: the rules state it"
        if ruled
        else "an axis of size 1, a role that shards something of this model, or 'idle'",
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
            if not shards(plan, axis, component) and not _shards_unlisted(plan, axis, component):
                yield _role_shards_nothing(plan, axis, component, role)
        elif component not in declared.declared and declared.elsewhere not in (None, "idle", "stage"):
            left_idle[component] = tensors
    stream = left_idle.pop(SEQUENCE_PARALLEL[0], None) if declared.elsewhere == "tensor" else None
    if stream is not None:
        yield _left_idle(plan, axis, {SEQUENCE_PARALLEL[0]: stream})
    if left_idle:
        yield _left_idle(plan, axis, left_idle)


def _shards_unlisted(plan: Plan, axis: str, component: str) -> bool:
    """Whether an axis shards the rows or tokens of a component for which a user's own table lists weights only. Such a
    table has only the activations that the user requested."""
    table = plan.request.table
    listed = table.owner == "ours" or any(row.component == component for row in table.activations)
    return not listed and not {"batch", "length"}.isdisjoint(plan.request.layout.dims_sharded_by(axis, component))


def _role_shards_nothing(plan: Plan, axis: str, component: str, role: str) -> Draft:
    layout = plan.request.layout
    ruled = _rules_leave_it_out(plan, axis, component)
    finding = Finding(
        code="SW103",
        severity="info" if ruled else "error",
        where=f"axis '{axis}' in '{component}'",
        position=layout.entries[axis].position,
        found=f"role '{role}' of {product(plan.mesh, [axis])} shards no tensor of '{component}' in "
        f"{plan.request.table.name}",
        needed="nothing: the rule states it" if ruled else "a role that shards something there, or 'idle'",
        cost=f"'{component}' is computed {plan.mesh.size(axis)} times",
    )
    named = {**named_roles(layout.entries[axis]), component: "idle"}
    return Draft(finding=finding, candidates=(entry(plan, axis, named=named),))


def _rules_leave_it_out(plan: Plan, axis: str, component: str | None = None) -> bool:
    """Whether an axis would shard weights, of one component or of any, if rules did not leave it out."""
    return any(
        request.axis == axis and request.refused == "left-out"
        for tensor in plan.weights
        if component in (None, tensor.component)
        for request in tensor.axis_requests
    )


def _left_idle(plan: Plan, axis: str, repeated: dict[str, list[TensorPlan]]) -> Draft:
    """What an axis repeats where its role has nothing to shard. The largest tensor is shown."""
    layout = plan.request.layout
    declared = layout.entries[axis]
    tensors = [t for rows in repeated.values() for t in rows]
    tensor = largest_first(tensors)[0]
    held = sum(device_bytes(t) for t in tensors)
    component, logical_axis = SEQUENCE_PARALLEL
    parallel = declared.elsewhere == "tensor" and component in repeated and logical_axis in tensor.spec.logical_axes
    entire = (0, len(str(tensor.spec)))
    finding = Finding(
        code="SW103",
        severity="info",
        tensor=tensor.name,
        where=f"axis '{axis}' in {every(repr(c) for c in repeated)}",
        position=declared.position,
        notation=str(tensor.spec),
        mark=place_in(tensor.spec, tensor.spec.logical_axes.index(logical_axis)) if parallel else entire,
        found=f"idle there: role '{declared.elsewhere}' has nothing to shard",
        needed="nothing: 'elsewhere' leaves it idle where its role has nothing to shard",
        cost=f"{bytes_text(held)} of weights and activations of all layers a device, replicated over "
        f"{product(plan.mesh, [axis])}; {bytes_text(device_bytes(tensor), like=held)} of it are {tensor.name}",
    )
    return Draft(finding=finding, candidates=(entry(plan, axis, sequence_parallel=True),) if parallel else ())
