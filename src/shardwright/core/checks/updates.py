"""SW124: updates that an axis is to shard and does not, and updates of which sharding saves nothing."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.checks.edits import entry, resized
from shardwright.core.checks.tensors import device_bytes, largest_first, weight_rows
from shardwright.core.findings.draft import Draft
from shardwright.core.findings.finding import Finding
from shardwright.core.layout.wording import bytes_text, counted, every, others, product
from shardwright.core.mesh.divisors import divisors
from shardwright.core.model.table import DTYPE_BYTES, Weight
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.resolution.update import update_axes


def updates(plan: Plan) -> Iterator[Draft]:
    """An error for an axis that shards no update; a warning for weights of which no dim is divisible; and information for an
    optimizer that keeps nothing."""
    layout, mesh = plan.request.layout, plan.mesh
    asked = [axis for axis in mesh.larger_than_one(mesh.names) if layout.entries[axis].optimizer]
    sharding = {
        axis for row in plan.weights for axis in row.updated.axes if axis not in (row.at_rest or row.in_use).axes
    }
    for axis in asked:
        if axis not in sharding:
            yield _nothing(plan, axis)
        elif not plan.request.kept:
            yield _nothing_kept(plan, axis)
    groups: dict[tuple[tuple[int, ...], tuple[str, ...]], list[tuple[TensorPlan, Weight]]] = {}
    for row, weight in weight_rows(plan):
        assert row.at_rest is not None
        axes = mesh.larger_than_one(update_axes(weight, layout, row.at_rest, row.in_use))
        if axes and weight.storage and not row.update_is_sharded and sharding.issuperset(axes):
            groups.setdefault((tuple(weight.size(name) for name in weight.storage), axes), []).append((row, weight))
    for (_, axes), found in groups.items():
        yield _undivided(plan, axes, found)


def _nothing(plan: Plan, axis: str) -> Draft:
    finding = Finding(
        code="SW124",
        severity="error",
        where=f"option 'optimizer' of axis '{axis}'",
        position=plan.request.layout.entries[axis].position,
        found=f"{product(plan.mesh, [axis])} shards the update of no weight: it replicates none whose gradient it sums and of "
        f"which a dim is divisible",
        needed="an axis that replicates weights, and divides one of their dims",
    )
    sizes = (size for size in reversed(divisors(plan.mesh.size(axis))[1:-1]))
    cures = [candidate for size in sizes for candidate in resized(plan, axis, size)]
    return Draft(finding=finding, candidates=(entry(plan, axis, optimizer=None, gradients=None), *cures))


def _nothing_kept(plan: Plan, axis: str) -> Draft:
    finding = Finding(
        code="SW124",
        severity="info",
        where=f"option 'optimizer' of axis '{axis}'",
        position=plan.request.layout.entries[axis].position,
        found=f"{plan.request.optimizer.text} keeps nothing for a weight",
        needed="an optimizer with state, or no option",
        cost="weights are gathered in place of an all-reduce of their gradients, and no memory is saved between steps",
    )
    return Draft(finding=finding, candidates=(entry(plan, axis, optimizer=None, gradients=None),))


def _undivided(plan: Plan, axes: tuple[str, ...], found: list[tuple[TensorPlan, Weight]]) -> Draft:
    tensors = largest_first(row for row, _ in found)
    first, weight = next(one for one in found if one[0] is tensors[0])
    kept = sum(DTYPE_BYTES[str(one.dtype)] for one in plan.request.kept) / DTYPE_BYTES[plan.request.weights_dtype]
    extra = sum(device_bytes(row) for row in tensors) * kept * (1 - 1 / plan.mesh.size(axes))
    finding = Finding(
        code="SW124",
        severity="warning",
        tensor=first.name,
        where=f"update of {first.name} over {every(repr(axis) for axis in axes)}",
        position=plan.request.layout.entries[axes[0]].position,
        notation=str(first.at_rest),
        found=f"{product(plan.mesh, axes)}, with the axes on a dim already, divides none of "
        f"{every(counted(weight.size(name), name) for name in weight.storage)}\n{others([row.name for row in tensors], 'weight')}",
        needed="a product that divides one of them",
        cost=f"{bytes_text(extra)} a device more of what the optimizer keeps",
    )
    sizes = reversed(divisors(plan.mesh.size(axes[-1]))[1:-1])
    return Draft(finding=finding, candidates=tuple(one for size in sizes for one in resized(plan, axes[-1], size)))
