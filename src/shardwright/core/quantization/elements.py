"""Which elements of a global operand a device has. Random numbers are drawn by these indices, so that no layout moves them.

| dim | index of an element |
|---|---|
| tokens | row of the step's batch x length of a row + position in the text; microbatch i has every so many rows, from row i |
| tokens of an expert | number among the rows of its expert on the device; each device that has rows of an expert draws others |
| inputs, outputs | place in the merged dim |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.table import EXPERT_TOKENS
from shardwright.core.quantization.quantized import QuantizedWeight, ShardedDim
from shardwright.core.recipes.recipe import Dim, Operand, Product
from shardwright.core.resolution.row_order import tiles

ROWS_OF_TOKENS = ("length", "kv_length")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiled:
    """A logical dim of ``size`` elements in equal tiles, of which each device of ``axes`` has as many, one device after the other.
    ``tiles``: their places in the dim.

    >>> Tiled(size=16, axes=("context",), tiles=(0, 3, 1, 2)).of_device(1, 2)
    (range(4, 8), range(8, 12))
    """

    size: int
    axes: tuple[str, ...]
    tiles: tuple[int, ...]

    @property
    def width(self) -> int:
        return self.size // len(self.tiles)

    def of_device(self, index: int, num: int) -> tuple[range, ...]:
        """The elements of a device, by its index among the ``num`` of ``axes``."""
        own, width = len(self.tiles) // num, self.width
        return tuple(range(tile * width, (tile + 1) * width) for tile in self.tiles[index * own : (index + 1) * own])


@dataclass(frozen=True, slots=True, kw_only=True)
class Elements:
    """The elements of an operand on a device, by dim: logical dims, merged major first.

    ``microbatches``: of a step. ``experts``: of the weight, or None. ``sources``: the axes whose devices have other rows of an expert,
    and how many devices these are.
    """

    dims: Mapping[Dim, tuple[Tiled, ...]]
    microbatches: int = 1
    experts: Tiled | None = None
    sources: tuple[str, ...] = ()
    num_sources: int = 1


def elements_of(
    weight: QuantizedWeight, mesh: Mesh, chunks: Sequence[int], microbatches: int
) -> Mapping[tuple[Product, Operand], Elements]:
    """Those of each operand of a weight that is rounded stochastically. ``chunks``: the order of a row's chunks."""
    found: dict[tuple[Product, Operand], Elements] = {}
    for one in weight.operands:
        if one.quantizer.rounding != "stochastic":
            continue
        tokens = one.dims.get("tokens")
        sources = tokens.axes if tokens is not None and tokens.names == EXPERT_TOKENS else ()
        experts = None
        if weight.experts is not None:
            experts = _tiled(weight.experts, weight.expert_axes, (0,), mesh)
        found[one.product, one.operand] = Elements(
            dims={dim: _dim(sharded, mesh, chunks) for dim, sharded in one.dims.items() if not _of_experts(sharded)},
            microbatches=microbatches,
            experts=experts,
            sources=sources,
            num_sources=mesh.size(sources),
        )
    return found


def _of_experts(dim: ShardedDim) -> bool:
    return dim.names == EXPERT_TOKENS


def _dim(dim: ShardedDim, mesh: Mesh, chunks: Sequence[int]) -> tuple[Tiled, ...]:
    if not any(name in ROWS_OF_TOKENS for name in dim.names) and not any(dim.sharding[1:]):
        # PyTorch shards the merged dim, so that a shard may end inside a head.
        return (_tiled(dim.size, dim.axes, (0,), mesh),)
    return tuple(
        _tiled(size, axes, chunks if name in ROWS_OF_TOKENS else (0,), mesh)
        for name, size, axes in zip(dim.names, dim.sizes, dim.sharding, strict=True)
    )


def _tiled(size: int, axes: tuple[str, ...], chunks: Sequence[int], mesh: Mesh) -> Tiled:
    return Tiled(size=size, axes=axes, tiles=tiles(chunks, mesh.size(axes)))
