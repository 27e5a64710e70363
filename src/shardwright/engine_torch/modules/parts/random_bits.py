"""What a module keeps for random bits, as buffers; and which bits a rank's elements have.

| buffer | |
|---|---|
| ``seed`` | two words of 32 bits, drawn when the module is constructed |
| ``passes`` | the number of backward passes of the module's products: each has bits of its own |

Both are the same on all ranks. The bits that round an element are a function of them, of the names of the weight and the operand, and
of the element's index in all ranks' tokens and in the entire weight, so that ranks with the same elements draw the same. The signs of
transforms are a function of the seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from shardwright.core.quantization.elements import Elements, Tiled
from shardwright.core.recipes.random_bits import words_of
from shardwright.core.recipes.recipe import DIMS, Dim, Operand, Quantizer, Recipe
from shardwright.engine_torch.io.layer_io import LowPrecision, Site
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.modules.parts.tensor_parallel import Mode
from shardwright.engine_torch.precision.random_bits import signed

SOURCES, TP = "sources", "tp"


def is_random(recipe: Recipe) -> bool:
    return any(one.rounding == "stochastic" or one.hadamard is not None for one in recipe.quantizers.values())


class RandomBits(nn.Module):
    """The buffers of a module whose recipe has random bits."""

    seed: torch.Tensor
    passes: torch.Tensor

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self.first_seed = seed
        self.register_buffer("seed", torch.zeros(2, dtype=torch.int32, device=device))
        self.register_buffer("passes", torch.zeros((), dtype=torch.int32, device=device))
        self.reset()

    def reset(self) -> None:
        """The state before the first pass."""
        self.seed.copy_(torch.tensor([signed(word) for word in words_of(self.first_seed)], dtype=torch.int32))
        self.passes.zero_()

    @property
    def has_passes(self) -> bool:
        return not self.passes.is_meta and bool(self.passes)

    def at(self, site: Site) -> Site:
        """A site whose bits are of this seed."""
        return replace(site, seed=self.seed, passes=self.passes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Ranks with tokens of their own: one for each group of tp. ``index``: of this rank's, among ``num`` of them."""

    index: int
    num: int


THIS = Source(index=0, num=1)
"""Where it is not known which ranks have tokens: an element's index is one among the rank's own."""


def source_of(tp: Sequence[int], group: dist.ProcessGroup) -> Source:
    """The source of a rank's tokens. ``tp``: its ranks, of the world. ``group``: all ranks that have tokens of the module, which call
    this together."""
    of_all: list[int | None] = [None] * dist.get_world_size(group)
    if len(of_all) == 1 or dist.get_backend(group) == "fake":
        return THIS
    first = min(tp)
    dist.all_gather_object(of_all, first, group=group)
    firsts = sorted({one for one in of_all if one is not None})
    return Source(index=firsts.index(first), num=len(firsts))


def with_elements(
    low: LowPrecision,
    tokens: Sequence[int] | None,
    sizes: Mapping[Dim, int],
    mode: Mode | None,
    source: Source,
    tp: Peers,
    *,
    tp_tokens: bool,
) -> LowPrecision:
    """The same with the elements that this rank has of each operand.

    ``tokens``: this rank's, the dims before the features, of which sources shard the first; None: tokens of one of several layers, of
    which each source has as many as there are. ``tp_tokens``: tp shards the first dim too. ``sizes``: of the local weight.
    """
    axes, num = ((SOURCES, TP), source.num * tp.size) if tp_tokens else ((SOURCES,), source.num)
    of_weight: dict[Dim, tuple[Tiled, ...]] = {}
    sharded: Dim | None = {"column": "outputs", "row": "inputs", None: None}[mode]
    if sharded is not None:
        of_weight[sharded] = (_tiled(sizes[sharded], (TP,), tp.size),)
    coordinates = {(): (0, 1), (SOURCES,): (source.index, source.num), (TP,): (tp.index, tp.size)}
    coordinates[SOURCES, TP] = (source.index * tp.size + tp.index, source.num * tp.size)

    def elements(operand: Operand, quantizer: Quantizer) -> Elements:
        dims: dict[Dim, tuple[Tiled, ...]] = {**of_weight}
        if tokens is not None:
            dims["tokens"] = _rows(tokens, axes, num, quantizer.hadamard)
        own: Mapping[Dim, tuple[Tiled, ...]] = {dim: dims[dim] for dim in DIMS[operand] if dim in dims}
        if tokens is None and "tokens" in DIMS[operand]:
            return Elements(dims=own, sources=(SOURCES,), num_sources=source.num)
        return Elements(dims=own)

    return replace(
        low,
        elements={
            (product, operand): elements(operand, quantizer)
            for (product, operand), quantizer in low.quantizers.items()
            if quantizer.rounding == "stochastic"
        },
        here=coordinates.__getitem__,
    )


def _rows(tokens: Sequence[int], axes: tuple[str, ...], num: int, hadamard: int | None) -> tuple[Tiled, ...]:
    """Rows of tokens, and the tokens of a row. ``hadamard``: groups of so many tokens are transformed together."""
    *rows, length = tokens
    if rows or length % (hadamard or 1):
        # The last group of a row is filled up, so tokens in no rows are a row of each rank.
        return _tiled(prod(rows), axes, num), _tiled(length, (), 1)
    return _tiled(1, (), 1), _tiled(length, axes, num)


def _tiled(own: int, axes: tuple[str, ...], num: int) -> Tiled:
    return Tiled(size=own * num, axes=axes, tiles=tuple(range(num)))
