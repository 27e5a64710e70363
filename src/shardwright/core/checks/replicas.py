"""SW101: weights and activations that are replicated over an axis that could shard them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shardwright.core.checks.edits import entry, named_roles, resized, rule, without_rule
from shardwright.core.checks.tensors import (
    device_bytes,
    largest_first,
    shards,
    state_factor,
    unsharded_bytes,
    weight_rows,
)
from shardwright.core.findings.codes import Severity
from shardwright.core.findings.draft import Candidate, Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.findings.position import Position
from shardwright.core.findings.thresholds import REPLICATED_ERROR_SHARE, REPLICATED_WARNING_SHARE
from shardwright.core.layout.wording import bytes_text, every, others, percent, product
from shardwright.core.mesh.notation import place_in
from shardwright.core.model.table import Weight
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.resolution.resolve import Refusal

Cause = Literal["data", "idle", "kept-whole", "no-axis", "left-out", "no-list", "no-dim"]

CAUSES: Mapping[Cause, str] = {
    "data": "role 'data' replicates them",
    "idle": "the axis is idle there",
    "kept-whole": "'weights: whole' replicates them",
    "no-axis": "a rule gives them no axis",
    "left-out": "a rule leaves the axis out",
    "no-list": "the model's table gives no dim to shard at rest",
    "no-dim": "the role has no dim to shard there, and is not a storage role",
}
"""Why a mesh axis larger than 1 does not shard weights at rest."""

DECLARED: Mapping[Cause, str] = {
    "data": "the role states it",
    "idle": "the role states it",
    "kept-whole": "the option states it",
    "no-axis": "the rule states it",
}
"""Causes that the layout states explicitly. They are reported with their cost, and are no errors."""

ROLE_CAUSES: Mapping[str, Cause] = {"data": "data", "idle": "idle"}
"""Roles that are a cause themselves. For other roles the cause is why the axis was refused."""

AT_MOST_A_WARNING = ("left-out",)
"""A rule that names axes and leaves one out may be intended or an oversight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A weight that is replicated over some axes, for one cause."""

    tensor: TensorPlan
    weight: Weight
    axes: tuple[str, ...]
    cause: Cause


def replicated_weights(plan: Plan) -> Iterator[Draft]:
    """Weights, grouped by the axes over which they are replicated and the cause, with their share of all weights' bytes."""
    total = sum(unsharded_bytes(tensor) for tensor in plan.weights)
    groups: dict[tuple[Cause, tuple[str, ...], bool], list[Replicated]] = {}
    for replicated in _replicated(plan):
        unsharded = not plan.mesh.larger_than_one(replicated.tensor.spec.axes)
        key = (replicated.cause, replicated.axes, unsharded and replicated.cause not in DECLARED)
        groups.setdefault(key, []).append(replicated)
    for (cause, axes, unsharded), group in groups.items():
        share = sum(unsharded_bytes(w.tensor) for w in group) / total
        severity = _severity(share, cause)
        if severity is not None:
            yield _weights(plan, cause, axes, unsharded, group, total, severity)


def _severity(share: float, cause: Cause) -> Severity | None:
    if share < REPLICATED_WARNING_SHARE.value:
        return None
    if cause in DECLARED:
        return "info"
    return "warning" if share < REPLICATED_ERROR_SHARE.value or cause in AT_MOST_A_WARNING else "error"


def _replicated(plan: Plan) -> Iterator[Replicated]:
    layout, mesh = plan.request.layout, plan.mesh
    # SW103 reports an axis that shards nothing at all.
    at_work = [axis for axis in mesh.larger_than_one(mesh.names) if shards(plan, axis)]
    for tensor, weight in weight_rows(plan):
        refusals: dict[str, Refusal | None] = {a.axis: a.refused for a in tensor.axis_requests}
        causes: dict[Cause, list[str]] = {}
        for axis in at_work:
            if axis in tensor.spec.axes:
                continue
            role, refused = layout.role(axis, tensor.component), refusals.get(axis)
            if refused in ("none-divides", "taken") or (role == "idle" and axis not in _free(plan, tensor.component)):
                continue
            cause = ROLE_CAUSES.get(role) or (_ruled(plan, tensor) if refused == "left-out" else refused or "no-dim")
            causes.setdefault(cause, []).append(axis)
        for cause, axes in causes.items():
            yield Replicated(tensor=tensor, weight=weight, axes=tuple(axes), cause=cause)


def _weights(
    plan: Plan,
    cause: Cause,
    axes: tuple[str, ...],
    unsharded: bool,
    group: list[Replicated],
    total: int,
    severity: Severity,
) -> Draft:
    tensors = largest_first(w.tensor for w in group)
    tensor = tensors[0]
    held = sum(unsharded_bytes(t) for t in tensors)
    share = 1 - 1 / plan.mesh.size(axes)
    saved = sum(device_bytes(t) for t in tensors) * share
    with_state = sum(device_bytes(t) * state_factor(plan, t, axes) for t in tensors) * share
    copies = "no axis shards them" if unsharded else f"each shard is on {plan.mesh.size(axes)} devices"
    where = f"weights over {every(repr(a) for a in axes)}, {tensor.name} the largest"
    finding = Finding(
        code="SW101",
        severity=severity,
        tensor=tensor.name,
        where=where,
        position=_position(plan, cause, axes, tensor),
        notation=str(tensor.spec),
        mark=_storage_dim(group, tensor),
        found=f"{bytes_text(held, like=total)} of {bytes_text(total)} of weights ({percent(held / total)}) replicated over "
        f"{product(plan.mesh, axes)}: {CAUSES[cause]}, and {copies}\n{others([t.name for t in tensors], 'weight')}",
        needed=f"nothing: {DECLARED[cause]}" if cause in DECLARED else _threshold_text(),
        cost=f"{bytes_text(saved)} a device more than if sharded, {bytes_text(with_state)} with gradient and moments",
    )
    return Draft(finding=finding, candidates=tuple(_cures(plan, cause, axes, tensor, severity == "error")))


def _ruled(plan: Plan, tensor: TensorPlan) -> Cause:
    """The cause by whether the rules for a weight's dims name any axis."""
    rules = [
        r
        for r in plan.request.layout.rules
        if r.component == tensor.component and r.logical_axis in tensor.spec.logical_axes
    ]
    return "left-out" if any(rule.axes for rule in rules) else "no-axis"


def _threshold_text() -> str:
    error, warning = REPLICATED_ERROR_SHARE.value, REPLICATED_WARNING_SHARE.value
    return f"less than {percent(warning)} of the bytes (from {percent(error)} on it is an error)"


def _position(plan: Plan, cause: Cause, axes: tuple[str, ...], tensor: TensorPlan) -> Position | None:
    layout = plan.request.layout
    if cause in ("left-out", "no-axis"):
        return next((r.position for r in layout.rules if r.component == tensor.component), None)
    return layout.entries[axes[0]].position


def _storage_dim(group: list[Replicated], tensor: TensorPlan) -> tuple[int, int] | None:
    """The place in the spec of the first dim of the weight's storage list, or of its first dim."""
    weight = next(w.weight for w in group if w.tensor is tensor)
    name = weight.storage[0] if weight.storage else weight.logical_axes[0]
    return place_in(tensor.spec, tensor.spec.logical_axes.index(name))


def _cures(plan: Plan, cause: Cause, axes: tuple[str, ...], tensor: TensorPlan, error: bool) -> Iterator[Candidate]:
    layout = plan.request.layout
    if cause == "kept-whole":
        yield entry(plan, axes[0], weights=None)
    elif cause in ("left-out", "no-axis"):
        for r in layout.rules:
            if r.component == tensor.component and r.logical_axis in tensor.spec.logical_axes:
                yield rule(r.component, r.logical_axis, (*r.axes, *(a for a in axes if a not in r.axes)))
                yield without_rule(r.component, r.logical_axis)
    elif cause == "data":
        if not layout.entries[axes[0]].declared:
            yield from resized(plan, axes[0], 1, absorbing=("fsdp",))
        yield entry(plan, axes[0], elsewhere="fsdp", named=named_roles(layout.entries[axes[0]], without="data"))
    elif cause == "no-dim" and error:
        yield from resized(plan, axes[0], 1)


def replicated_activations(plan: Plan) -> Iterator[Draft]:
    """Activations that no axis shards, where an axis that the layout states idle could shard their rows or tokens."""
    mesh, layout = plan.mesh, plan.request.layout
    total = sum(unsharded_bytes(tensor) for tensor in plan.activations)
    groups: dict[tuple[str, ...], list[TensorPlan]] = {}
    for tensor in plan.activations:
        free = tuple(axis for axis in _free(plan, tensor.component) if shards(plan, axis))
        tokens = {"batch", "length", "groups"} & set(tensor.in_use.logical_axes)
        if free and tokens and not mesh.larger_than_one(tensor.in_use.axes):
            groups.setdefault(free, []).append(tensor)
    for free, tensors in groups.items():
        held = sum(unsharded_bytes(t) for t in tensors)
        if held / total < REPLICATED_WARNING_SHARE.value:
            continue
        tensors = largest_first(tensors)
        tensor = tensors[0]
        finding = Finding(
            code="SW101",
            severity="info",
            tensor=tensor.name,
            where=f"activations over {every(repr(axis) for axis in free)}, {tensor.name} the largest",
            position=layout.entries[free[0]].position,
            notation=str(tensor.in_use),
            mark=place_in(tensor.in_use, 0),
            found=f"{bytes_text(held, like=total)} of {bytes_text(total)} of activations ({percent(held / total)}) that no "
            f"axis shards; {product(mesh, free)} could\n{others([t.name for t in tensors], 'activation')}",
            needed="nothing: the role states it",
            cost=f"{mesh.num_devices} devices each compute all of them",
        )
        roles, named = ("fsdp", "context", "data"), named_roles(layout.entries[free[0]], without="idle")
        cures = [entry(plan, free[0], elsewhere=role, named=named) for role in roles]
        yield Draft(finding=finding, candidates=tuple(cures))


def _free(plan: Plan, component: str) -> tuple[str, ...]:
    """The axes that the layout states idle in a component. SW103 reports those that their role leaves idle."""
    entries = plan.request.layout.entries
    return tuple(
        axis
        for axis in plan.mesh.larger_than_one(plan.mesh.names)
        if entries[axis].roles[component] == "idle"
        and (component in entries[axis].declared or entries[axis].elsewhere in (None, "idle"))
    )
