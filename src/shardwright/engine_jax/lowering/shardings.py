"""From specs to shardings: the axes of a dim, major first, become a tuple in the PartitionSpec."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan, TensorPlan


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec as a PartitionSpec: one entry per dim, None where the dim is not sharded.

    >>> from shardwright.core.mesh.notation import parse
    >>> partition_spec(parse("batch/data/fsdp length/expert embed")) == PartitionSpec(("data", "fsdp"), "expert", None)
    True
    """
    entries = [dim.axes if len(dim.axes) > 1 else (dim.axes[0] if dim.axes else None) for dim in spec.dims]
    return PartitionSpec(*entries)


def named_sharding(spec: Spec, mesh: Mesh) -> NamedSharding:
    """A spec on a JAX mesh that has its axes."""
    return NamedSharding(mesh, partition_spec(spec))


def at_rest_spec(tensor: TensorPlan) -> Spec:
    """The spec of a weight at rest in this engine, which stacks the layers of a row along a leading dim."""
    assert tensor.at_rest is not None
    if tensor.stack is None or tensor.at_rest.dims[0].logical_axis == "layers":
        return tensor.at_rest
    return tensor.at_rest.prefixed("layers")


def at_rest_shape(tensor: TensorPlan) -> tuple[int, ...]:
    """The shape of a weight at rest, with its layers stacked."""
    return tensor.shape if tensor.stack is None else (tensor.num, *tensor.shape)


def saved_shape(tensor: TensorPlan) -> tuple[int, ...]:
    """The shape of a weight in a checkpoint: at rest, without the padding of a vocabulary."""
    return tensor.saved_shape if tensor.stack is None else (tensor.num, *tensor.saved_shape)


def weight_shardings(plan: Plan, mesh: Mesh) -> Mapping[str, NamedSharding]:
    """The sharding at rest of every weight of a plan, by name, with layers stacked as in ``at_rest_spec``."""
    return {tensor.name: named_sharding(at_rest_spec(tensor), mesh) for tensor in plan.weights}
