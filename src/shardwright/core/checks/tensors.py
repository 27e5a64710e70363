"""Properties of a plan's tensors that several checks use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from shardwright.core.model.table import DTYPE_BYTES, Weight
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import weight_update
from shardwright.core.resolution.resolve import as_stored


def weight_rows(plan: Plan) -> Iterator[tuple[TensorPlan, Weight]]:
    """Each weight of the plan with its row of the model's table, in the dims of the plan's engine."""
    for tensor, weight in zip(plan.weights, plan.request.table.weights, strict=True):
        assert tensor.name == weight.name
        yield tensor, as_stored(plan.request, weight)


def unsharded_bytes(tensor: TensorPlan) -> int:
    """Bytes of all layers of an unsharded tensor."""
    return prod(tensor.shape) * tensor.num * DTYPE_BYTES[tensor.dtype]


def device_bytes(tensor: TensorPlan) -> int:
    """Bytes of all layers of a tensor on one device."""
    return tensor.bytes_per_device * tensor.num


def largest_first(tensors: Iterable[TensorPlan]) -> list[TensorPlan]:
    return sorted(tensors, key=lambda tensor: (-unsharded_bytes(tensor), tensor.name))


def shards(plan: Plan, axis: str, component: str | None = None) -> bool:
    """Whether an axis shards any tensor of the model, or of one component, at rest or in use."""
    return any(
        axis in tensor.spec.axes or axis in tensor.in_use.axes
        for tensor in plan.tensors
        if component is None or tensor.component == component
    )


def state_factor(plan: Plan, tensor: TensorPlan, axes: Iterable[str]) -> float:
    """Bytes of a weight, its gradient and what is kept for it (moments, an average) for each byte of the weight, of those that some axes
    replicate."""
    update, sharding = weight_update(plan.request, plan.mesh, tensor), set(axes)
    kept = sum(DTYPE_BYTES[kept.dtype] for kept in plan.request.kept if kept.dtype is not None)
    bytes_of_weight = DTYPE_BYTES[plan.request.weights_dtype]
    gradient = 0 if sharding & set(update.held.axes) else DTYPE_BYTES[plan.request.summed_in]
    return 1 + (gradient + (0 if sharding & set(update.in_update.axes) else kept)) / bytes_of_weight
