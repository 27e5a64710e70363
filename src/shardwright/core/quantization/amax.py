"""Which devices agree on an amax, and how many values they exchange.

| what shares a scale | who agrees |
|---|---|
| a block inside a shard | nobody: each device has the block |
| all of a dim (a row, a tensor) | the devices of the axes that shard the dim, where the operand is quantized |
| the second scale of a tensor | the devices of the axes that shard the tensor |

Replicas have the same values, so they never take part. A matrix of each expert is a tensor of its own, so the axes that shard
experts never take part either.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.quantization.quantized import ShardedDim
from shardwright.core.recipes.recipe import Dim, Quantizer

Extents = Mapping[Dim, int | None]
Dims = Mapping[Dim, ShardedDim]


def sharing_axes(quantizer: Quantizer, extents: Extents, dims: Dims, mesh: Mesh) -> tuple[str, ...]:
    """The axes over which values that share a scale are sharded, in mesh order."""
    entire: list[Dim] = [dim for dim, extent in extents.items() if extent is None or quantizer.scale.of_tensor]
    return mesh.in_mesh_order(axis for dim in entire for axis in dims[dim].axes)


def num_amaxes(quantizer: Quantizer, extents: Extents, dims: Dims, mesh: Mesh) -> int:
    """How many amaxes a device has of what it shares with others: one for a tensor, one for each row."""
    shared = any(extent is None and dims[dim].axes for dim, extent in extents.items())
    blocks = prod(1 if e is None else ceil(dims[dim].on_device(mesh) / e) for dim, e in extents.items())
    return (blocks if shared else 0) + (1 if quantizer.scale.of_tensor else 0)


def amax_key(identity: tuple[str, ...], quantizer: Quantizer, extents: Extents) -> tuple[str, ...]:
    """Equal for operands that are the same tensor and have the same amaxes, whatever their formats."""
    entire = tuple(sorted(dim for dim, extent in extents.items() if extent is None))
    blocks = tuple(f"{dim} {e}" for dim, e in sorted(extents.items()) if e is not None) if entire else ()
    of = ("tensor",) if quantizer.scale.of_tensor or len(entire) == len(extents) else ()
    return (*identity, *entire, *blocks, *of, f"hadamard {quantizer.hadamard}")
