"""Whether the layout, or the number of microbatches, can move what is quantized.

Compared is one device that computes the step in one microbatch.

| what shares a scale | free |
|---|---|
| a tensor, or all of a dim | if the amax is reduced over the axes that shard it; of activations, only in one microbatch, or where it is delayed: then the scale is known before the step |
| a block along inputs or outputs | if every shard ends with a block |
| the same of keys that a ring passes on | not: each shard is multiplied, and quantized, apart from the others |
| a block over the tokens of a row | if every run of tokens that a device has in their order ends with a block; of an expert's tokens, whose order and number follow from the layout, on one device only |

An operand that is partial over an axis is another one on each device, and so are random numbers that each device draws itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd, lcm

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.quantization.amax import Dims, Extents
from shardwright.core.quantization.quantized import Freedom, ShardedDim
from shardwright.core.recipes.recipe import Operand, Product, Quantizer, Recipe

KEYS = "kv_length"
"""The tokens of keys where they attend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What freedom depends on besides the operand. ``chunks``: into how many parts load balancing divides a row. ``ring``: how many
    shards of the keys a ring passes on, of which a device multiplies one at a time; 1 without one."""

    mesh: Mesh
    microbatches: int
    chunks: int
    ring: int = 1

    def shards(self, dims: Dims) -> int:
        """How many parts of an operand are multiplied, one at a time."""
        return self.ring if "tokens" in dims and KEYS in dims["tokens"].names else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an operand is. ``partial``: the axes over which it is. ``scattering``: of an expert's tokens, the axes by which
    their order and number follow from the layout; None for other tokens."""

    product: Product
    operand: Operand
    dims: Dims
    partial: tuple[str, ...] = ()
    scattering: tuple[str, ...] | None = None


def freedom(recipe: Recipe, quantizer: Quantizer, place: Place, sharing: tuple[str, ...], step: Step) -> Freedom:
    """Whether the layout can move the codes and scales of an operand; ``sharing``: the axes that shard what shares a scale."""
    if reason := next(_reasons(recipe, quantizer, place, sharing, step), ""):
        return Freedom(reason=reason)
    split = next(_split_blocks(quantizer.block.extents(place.product, place.operand), place.dims, step.mesh), "")
    return Freedom(reason=split, ends_inside=True) if split else Freedom(reduced=sharing)


def _reasons(recipe: Recipe, quantizer: Quantizer, place: Place, sharing: tuple[str, ...], step: Step) -> Iterator[str]:
    extents = quantizer.block.extents(place.product, place.operand)
    if place.partial:
        yield f"it is partial over {_listed(place.partial)} where it is quantized"
    if quantizer.rounding == "stochastic" and not recipe.counter_based and step.mesh.num_devices > 1:
        yield "each device draws its own random numbers"
    if sharing and not recipe.reduce_amax:
        whose = "its history is of what one device held" if quantizer.amax == "delayed" else "its amax is of one shard"
        yield f"{whose}, and {_listed(sharing)} shard{'s' if len(sharing) == 1 else ''} it"
    entire_tokens = extents.get("tokens", 1) is None or (quantizer.scale.of_tensor and "tokens" in extents)
    if entire_tokens and quantizer.amax == "current" and step.microbatches > 1:
        yield f"its amax is of one of {step.microbatches} microbatches"
    if entire_tokens and quantizer.amax == "current" and step.shards(place.dims) > 1:
        yield f"its amax is of one of {step.ring} shards of the keys around a ring"
    if "tokens" in extents:
        yield from _token_blocks(quantizer, place, extents, step)


def _split_blocks(extents: Extents, dims: Dims, mesh: Mesh) -> Iterator[str]:
    for dim, extent in extents.items():
        if dim != "tokens" and extent is not None and ends_inside(dims[dim], extent, mesh):
            grain = dims[dim].grain(mesh)
            yield f"shards of {grain:,} '{dims[dim].names[0]}' end inside blocks of {extent}"


def ends_inside(dim: ShardedDim, extent: int, mesh: Mesh) -> bool:
    """Whether a shard of a dim ends inside a block of ``extent`` elements. The last block of the dim may be short."""
    return bool(dim.axes) and dim.grain(mesh) % extent != 0


def _token_blocks(quantizer: Quantizer, place: Place, extents: Extents, step: Step) -> Iterator[str]:
    extent = extents["tokens"] or 1
    if quantizer.hadamard is not None and place.product == "weight_gradient":
        extent = lcm(extent, quantizer.hadamard)
    stochastic = quantizer.rounding == "stochastic"
    if extent == 1 and not (stochastic and place.scattering):
        return
    if place.scattering is not None:
        if place.scattering and extent == 1:
            yield f"random numbers are of slots of an expert's buffer, which {_listed(place.scattering)} change"
        elif place.scattering:
            yield f"blocks of {extent} tokens of an expert, whose order and number {_listed(place.scattering)} change"
        elif step.microbatches > 1:
            yield f"blocks of {extent} tokens of an expert, whose number {step.microbatches} microbatches change"
        return
    run = run_of_tokens(place.dims["tokens"], step)
    if run is not None and run % extent:
        yield f"blocks of {extent} tokens of a row, of which a device has {run:,} in their order"


def run_of_tokens(tokens: ShardedDim, step: Step) -> int | None:
    """The largest number of which every boundary between the runs of consecutive tokens of a row on a device is a multiple;
    None where a device has rows in their order. Blocks begin with each row, so how rows are sharded does not matter."""
    (_, length), (_, axes) = tokens.sizes, tokens.sharding
    parts = [step.chunks, step.mesh.size(axes), step.shards({"tokens": tokens})]
    return gcd(*(length // part for part in parts)) if max(parts) > 1 else None


def _listed(axes: tuple[str, ...]) -> str:
    return ", ".join(axes)
