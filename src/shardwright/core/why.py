"""Why a tensor lies as it does: for each mesh axis larger than 1 its role in the tensor's component, and what the role did with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shardwright.core.findings.position import Position
from shardwright.core.layout.roles import ROLES
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.resolution.resolve import Refusal

REFUSED: Mapping[Refusal, str] = {
    "left-out": "a rule of the layout leaves it out",
    "kept-whole": "the axis has `weights: whole`",
    "taken": "the axis shards another dim of this weight already",
    "none-divides": "its size divides none of the dims that it may shard",
    "no-list": "the model names no dim of this weight that may be stored in shards",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisReason:
    """What one axis does with a tensor. ``dim``: the logical axis that it shards, or None; ``why``: how that was decided. ``position``: the line
    of the layout's file that gives the role."""

    axis: str
    size: int
    role: str
    dim: str | None
    why: str
    position: Position | None = None

    def to_json(self) -> dict[str, object]:
        where = None if self.position is None else str(self.position)
        return {
            "axis": self.axis,
            "size": self.size,
            "role": self.role,
            "dim": self.dim,
            "why": self.why,
            "where": where,
        }


def reasons(plan: Plan, tensor: TensorPlan) -> Iterator[AxisReason]:
    """One for each axis larger than 1, in mesh order."""
    layout = plan.request.layout
    for axis in plan.mesh.larger_than_one(plan.mesh.names):
        entry = layout.entries[axis]
        role = layout.role(axis, tensor.component)
        dim, why = _decided(tensor, axis, role)
        yield AxisReason(axis=axis, size=plan.mesh.size(axis), role=role, dim=dim, why=why, position=entry.position)


def _decided(tensor: TensorPlan, axis: str, role: str) -> tuple[str | None, str]:
    in_use = _dim(tensor, axis, at_rest=False)
    if tensor.at_rest is None:
        if in_use is not None:
            return in_use, f"role {role} shards {in_use} of activations in '{tensor.component}'"
        able = ", ".join(ROLES[role].activations) or "no dim"
        return None, f"role {role} shards {able} of activations, and this tensor has none that it shards"
    at_rest = _dim(tensor, axis, at_rest=True)
    request = next((request for request in tensor.axis_requests if request.axis == axis), None)
    if at_rest is not None and in_use is None:
        tried = f", the first of {', '.join(request.tried)} that it divides" if request and request.tried else ""
        return at_rest, f"role {role} stores weights in shards: {at_rest}{tried}; gathered for use"
    if at_rest is not None:
        return at_rest, f"role {role} shards {at_rest} of weights in '{tensor.component}', at rest and in use"
    if request is not None and request.refused is not None:
        return None, f"role {role} would shard it, but {REFUSED[request.refused]}"
    return None, f"role {role} shards no dim of this weight: each device along the axis has a replica"


def _dim(tensor: TensorPlan, axis: str, *, at_rest: bool) -> str | None:
    spec = tensor.at_rest if at_rest else tensor.in_use
    if spec is None:
        return None
    return next((dim.logical_axis for dim in spec.dims if axis in dim.axes), None)
