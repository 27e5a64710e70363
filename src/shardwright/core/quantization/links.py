"""What the all-gathers of a weight send that is quantized on its shards at rest: codes, and the scales that a device lacks.

| array | sent |
|---|---|
| codes | by every gather of the weight |
| scales of blocks and rows | by gathers along a dim that has several of them |
| a scale of all of a dim, or of the tensor | by none: devices have agreed on its amax |
| scales of experts' matrices | by gathers of experts |

A copy of the weight serves the output and the input gradient if both quantize it alike. Otherwise there are two, and the one for
input gradients is gathered in the backward pass.

The dims of each array are experts, and the outputs and the inputs of the weight, each merged under its first logical axis.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from typing import Literal

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.mesh.spec import Spec
from shardwright.core.policies.repeated import share_again
from shardwright.core.policies.runs import runs_of
from shardwright.core.quantization.quantized import Copy, QuantizedOperand, QuantizedWeight, SentArray, ShardedDim
from shardwright.core.recipes.formats import E2M1, E8M0
from shardwright.core.recipes.recipe import CONTRACTED, PER_TENSOR, Dim, Product
from shardwright.core.resolution.request import Request

GatherPhase = Literal["forward", "recompute", "backward"]
Sides = Mapping[Dim, ShardedDim]
"""The inputs and the outputs of a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """One layer of a weight at rest, gathered, and as it is multiplied."""

    at_rest: Spec
    gathered: Spec
    in_use: Spec

    @property
    def are_gathered(self) -> bool:
        return self.at_rest != self.gathered


def copies(
    operands: Iterable[QuantizedOperand], specs: Specs, sides: Sides, experts: int, mesh: Mesh
) -> tuple[Copy, ...]:
    """The copies of a weight that is quantized at rest. ``operands``: of all its products; ``sides``: at rest; ``experts``:
    all of them, 0 where the weight has no such dim."""
    by_product = {one.product: one for one in operands if one.operand == "weight"}
    first, second = by_product.get("output"), by_product.get("input_gradient")
    if _alike(first, second):
        return (_copy(("output", "input_gradient"), first, specs, sides, experts, mesh),)
    return (
        _copy(("output",), first, specs, sides, experts, mesh),
        _copy(("input_gradient",), second, specs, sides, experts, mesh),
    )


def minor_dims(specs: Specs, sides: Iterable[ShardedDim]) -> tuple[str, ...]:
    """Logical axes that are gathered or sharded in use though they are not the first of merged dims: the codes of a shard are
    then no run of those of the weight, as codes of parts of all heads."""
    inner = [name for side in sides for name in side.names[1:]]
    return tuple(name for name in inner if any(one.axes_of(name) for one in (specs.at_rest, specs.in_use)))


def copy_phases(request: Request, weight: QuantizedWeight, copy: Copy) -> tuple[GatherPhase, ...]:
    """When a copy is gathered. Where a layer is not repeated in its order, no product is for its output alone, so that it
    needs a copy for outputs only where a later product of the layer does."""
    if "output" not in copy.products:
        return ("backward",)
    runs = runs_of(request.table, request.remat)
    again = weight.stack is not None and any(run.gathers_again for run in runs if run.stack == weight.stack)
    if again and not request.properties.repeats_in_order and len(copy.products) == 1:
        again = share_again(request.table, runs, request.table.weight(weight.name)) > 0
    return ("forward", "recompute") if again else ("forward",)


def _alike(first: QuantizedOperand | None, second: QuantizedOperand | None) -> bool:
    if first is None or second is None:
        return first is second
    same = replace(first.quantizer, block=PER_TENSOR) == replace(second.quantizer, block=PER_TENSOR)
    return same and first.extents == second.extents


def _copy(
    products: tuple[Product, ...],
    operand: QuantizedOperand | None,
    specs: Specs,
    sides: Sides,
    experts: int,
    mesh: Mesh,
) -> Copy:
    if operand is None:
        return Copy(products=products, quantizer=None, arrays=())
    return Copy(
        products=products,
        quantizer=operand.quantizer,
        arrays=tuple(_arrays(operand, specs, sides, experts, mesh)),
    )


def _arrays(operand: QuantizedOperand, specs: Specs, sides: Sides, experts: int, mesh: Mesh) -> Iterator[SentArray]:
    quantizer, contracted = operand.quantizer, CONTRACTED[operand.product]
    order: tuple[Dim, ...] = ("outputs", "inputs") if contracted == "inputs" else ("inputs", "outputs")
    names = {dim: sides[dim].names[0] for dim in order}
    leading = {"experts": experts} if experts else {}

    def array(dtype: str, per: Mapping[Dim, int], entire: Collection[Dim] = ()) -> SentArray:
        shape = dict(leading)
        for dim, elements in per.items():
            shards = mesh.size(specs.at_rest.axes_of(names[dim]))
            shape[names[dim]] = 1 if dim in entire else shards * ceil(ceil(sides[dim].size / shards) / elements)
        # Devices that agree on an amax have the scale of an entire dim.
        sharded = [*leading, *(names[dim] for dim in per if dim not in entire)]
        at_rest, gathered, in_use = (
            Spec.build(shape, {name: spec.axes_of(name) for name in sharded})
            for spec in (specs.at_rest, specs.gathered, specs.in_use)
        )
        each = (*(1 for _ in leading), *per.values())
        return SentArray(dtype=dtype, shape=shape, per=each, at_rest=at_rest, gathered=gathered, in_use=in_use)

    packed, extents = (2 if quantizer.dtype == E2M1 else 1), operand.extents
    yield array("uint8" if packed == 2 else quantizer.dtype, {dim: packed if dim == contracted else 1 for dim in order})
    scale = "uint8" if quantizer.scale.dtype == E8M0 else quantizer.scale.dtype
    yield array(scale, {dim: extents[dim] or 1 for dim in order}, [dim for dim in order if extents[dim] is None])
    if quantizer.scale.of_tensor:
        yield array("float32", {})
