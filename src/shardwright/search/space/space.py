"""Every layout that a search tries on a machine, without those that arithmetic ends.

| axis | sizes |
|---|---|
| any | every product of the devices' divisors over the axes of a form, at most ``MOST_AXES`` of them larger than 1 |
| stage | at most a layer each |
| expert | divides the experts |
| tensor | divides the heads, the KV heads and the tokens of a row, within a domain |
| context | divides the tokens of a row; within a domain where every device may have a row |
| what shards rows | divides the rows |

A count for each finding that ended a candidate goes beside them. What is left may still have errors, which the checks of a plan see.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from shardwright.core.findings.codes import NO_ROWS, TOO_LARGE
from shardwright.core.mesh.divisors import divisors
from shardwright.core.model.table import DTYPE_BYTES, ModelTable
from shardwright.core.resolution.request import Request
from shardwright.cost.hardware.machine import Machine
from shardwright.search.space.arrangements import Arrangement
from shardwright.search.space.forms import DENSE, MIXTURE, Form, form_named, layout_of

MOST_AXES = 4
"""Mesh axes of a layout that are larger than 1."""

SPLIT_UNIT, NO_LAYER, SLOW = "SW107", "SW110", "SW201"


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What is tried. ``ended``: how many candidates each finding ended by arithmetic alone. ``smallest``: of those with too much state, the
    one with the least."""

    arrangements: tuple[Arrangement, ...]
    ended: Mapping[str, int] = field(default_factory=dict)
    smallest: Arrangement | None = None


def space_of(request: Request, machine: Machine) -> Space:
    """The layouts for the model, rows and tokens of a request, on all devices of a machine."""
    ended: Counter[str] = Counter()
    kept: list[Arrangement] = []
    too_large: list[Arrangement] = []
    for form in forms_of(request.table):
        for sizes in _sizes(form, machine.num_devices):
            code = _ending(form, sizes, request, machine)
            if code is not None:
                ended[code] += 1
                if code == TOO_LARGE:
                    too_large.append(_arrangement(form, sizes))
                continue
            kept.append(_arrangement(form, sizes))
    smallest = min(too_large, key=lambda item: least_bytes(item, request), default=None)
    return Space(arrangements=tuple(kept), ended=dict(ended), smallest=smallest)


def _arrangement(form: Form, sizes: Mapping[str, int]) -> Arrangement:
    larger = {axis: size for axis, size in sizes.items() if size > 1} or {"fsdp": 1}
    return Arrangement(layout=layout_of(form, tuple(larger)), sizes=larger, form=form.name)


def forms_of(table: ModelTable) -> tuple[Form, ...]:
    return (DENSE,) if table.top_k is None else MIXTURE


def _sizes(form: Form, devices: int) -> Iterator[Mapping[str, int]]:
    """Sizes of all axes of a form whose product is the devices. Axes of experts are larger than 1: without them it is another form."""

    def of(axes: tuple[str, ...], left: int, larger: int) -> Iterator[tuple[int, ...]]:
        if not axes:
            if left == 1:
                yield ()
            return
        for size in divisors(left):
            if (size == 1 and form.has_experts(axes[0])) or (size > 1 and larger == MOST_AXES):
                continue
            for rest in of(axes[1:], left // size, larger + (size > 1)):
                yield (size, *rest)

    for sizes in of(form.names, devices, 0):
        yield dict(zip(form.names, sizes, strict=True))


def _ending(form: Form, sizes: Mapping[str, int], request: Request, machine: Machine) -> str | None:
    """The finding that a layout of these sizes has for certain; None if arithmetic sees none."""
    table = request.table
    by_role = {role: prod(sizes[axis] for axis in form.names if form.outside(axis) == role) for role in ROLES}
    experts = prod(sizes[axis] for axis in form.names if form.has_experts(axis))
    tensor, length = by_role["tensor"], by_role["context"] * by_role["tensor"]
    if tensor > machine.domain_devices or any(table.sizes.get(dim, tensor) % tensor for dim in ("heads", "kv_heads")):
        return SPLIT_UNIT
    if experts > 1 and table.sizes.get("experts", 1) % experts:
        return SPLIT_UNIT
    if by_role["stage"] > table.num_layers:
        return NO_LAYER
    if by_role["context"] > machine.domain_devices and request.batch >= machine.num_devices:
        return SLOW
    if request.batch % (by_role["data"] * by_role["fsdp"]) or request.length % length:
        return NO_ROWS
    limit = None if request.chip is None else request.chip.usable_bytes
    if limit is not None and least_state_bytes(form, sizes, request) > limit:
        return TOO_LARGE
    return None


ROLES = ("stage", "data", "fsdp", "context", "tensor")
"""Roles outside the experts."""


def least_bytes(arrangement: Arrangement, request: Request) -> float:
    """The bytes of ``least_state_bytes`` of an arrangement."""
    form = form_named(arrangement.form)
    return least_state_bytes(form, {axis: arrangement.sizes.get(axis, 1) for axis in form.names}, request)


def least_state_bytes(form: Form, sizes: Mapping[str, int], request: Request) -> float:
    """At least so many bytes of a device hold weights and what the optimizer keeps: each weight divided by all that may shard it."""
    sharding = prod(sizes[axis] for axis in form.names if form.outside(axis) in ("fsdp", "context", "tensor"))
    replicas = prod(sizes[axis] for axis in form.names if form.outside(axis) == "data")
    of_experts = prod(sizes[axis] for axis in form.names if form.has_experts(axis) and form.outside(axis) == "data")
    stages = prod(sizes[axis] for axis in form.names if form.outside(axis) == "stage")
    rests = DTYPE_BYTES[request.weights_dtype]
    kept = sum(DTYPE_BYTES[row.dtype or request.weights_dtype] for row in request.kept)
    total = 0.0
    for weight in request.table.weights:
        ways = sharding * (stages if weight.stack is not None else 1)
        left = replicas
        if "experts" in weight.logical_axes:
            ways, left = ways * of_experts, replicas // of_experts
        # Replicas may share what the optimizer keeps (ZeRO-1).
        total += weight.num_parameters * (rests / ways + (0 if weight.frozen else kept / (ways * left)))
    return total
