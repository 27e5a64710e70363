"""From specs to shardings: the notation's axes, major first, are a PartitionSpec's tuple."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan, TensorPlan


def partition_spec(spec: Spec) -> PartitionSpec:
    """A spec as JAX writes it: one entry per dim, None where the dim is whole.

    >>> from shardwright.core.mesh.notation import parse
    >>> partition_spec(parse("batch/data/fsdp length/expert embed")) == PartitionSpec(("data", "fsdp"), "expert", None)
    True
    """
    entries = [dim.axes if len(dim.axes) > 1 else (dim.axes[0] if dim.axes else None) for dim in spec.dims]
    return PartitionSpec(*entries)


def named_sharding(spec: Spec, mesh: Mesh) -> NamedSharding:
    """A spec on a mesh of devices that has its axes."""
    return NamedSharding(mesh, partition_spec(spec))


def resting_spec(tensor: TensorPlan) -> Spec:
    """A weight at rest as this engine keeps it: layers that share a row are stacked along a leading dim."""
    assert tensor.at_rest is not None
    if tensor.stack is None or tensor.at_rest.dims[0].logical_axis == "layers":
        return tensor.at_rest
    return tensor.at_rest.prefixed("layers")


def resting_shape(tensor: TensorPlan) -> tuple[int, ...]:
    """The shape of a weight with its layers stacked."""
    return tensor.shape if tensor.stack is None else (tensor.num, *tensor.shape)


def weight_shardings(plan: Plan, mesh: Mesh) -> Mapping[str, NamedSharding]:
    """Where every weight of a plan rests, by name, stacked as ``resting_spec`` says."""
    return {tensor.name: named_sharding(resting_spec(tensor), mesh) for tensor in plan.weights}
