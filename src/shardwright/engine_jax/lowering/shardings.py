"""From specs to shardings: the axes of a dim, major first, become a tuple in the PartitionSpec."""

from __future__ import annotations

from collections.abc import Mapping

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardwright.core.mesh.spec import Spec
from shardwright.core.plan.plan import Plan


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


def weight_shardings(plan: Plan, mesh: Mesh) -> Mapping[str, NamedSharding]:
    """The sharding at rest of every weight of a plan, by name, with layers stacked."""
    return {tensor.name: named_sharding(tensor.stacked_at_rest, mesh) for tensor in plan.weights}
