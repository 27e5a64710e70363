"""Shards that end inside a block: the unit of split of each dim of a quantized weight.

A quantized dim may be sharded between two blocks only. What is quantized on shards is what the unit binds: the weight in use,
and its input and output gradient, which the axes of ``tensor`` shard as they shard the weight. At rest, weights are in high
precision and quantized after they are gathered, so storage axes may end a shard anywhere, unless the recipe gathers
quantized weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import lcm

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.quantization.freedom import ends_inside
from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight, ShardedDim


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitBlock:
    """A dim of a weight whose shards end inside blocks of ``block`` elements. ``operand``: the first that has such a block."""

    weight: str
    component: str
    dim: ShardedDim
    block: int
    operand: QuantizedOperand


def split_blocks(weights: Iterable[QuantizedWeight], mesh: Mesh) -> Iterator[SplitBlock]:
    """Every dim of a weight that is sharded inside blocks, once, with the largest block."""
    for weight in weights:
        found: dict[tuple[str, ...], SplitBlock] = {}
        for operand in weight.operands:
            for dim, extent in operand.extents.items():
                sharded = operand.dims[dim]
                if dim == "tokens" or extent is None or not ends_inside(sharded, extent, mesh):
                    continue
                known = found.get(sharded.names)
                if known is None or known.block < extent:
                    found[sharded.names] = SplitBlock(
                        weight=weight.name,
                        component=weight.component,
                        dim=sharded,
                        block=extent,
                        operand=operand,
                    )
        yield from found.values()


def units_of(weight: QuantizedWeight) -> Mapping[str, int]:
    """The unit of split of each of a weight's two dims, by its first logical axis: how many elements may not be divided.

    1 where nothing is: a scale of the entire tensor or row has no boundary.
    """
    units = {weight.inputs[0]: 1, weight.outputs[0]: 1}
    for operand in weight.operands:
        for dim, extent in operand.extents.items():
            if dim != "tokens" and extent is not None:
                name = operand.dims[dim].names[0]
                units[name] = lcm(units[name], extent)
    return units
