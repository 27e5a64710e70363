"""What the all-gathers of a weight send for each element: its dtype, or codes and their share of the scales."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import prod

from shardwright.core.quantization.quantized import QuantizedOperand, QuantizedWeight
from shardwright.core.recipes.formats import bits_of
from shardwright.core.recipes.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathers:
    """Bytes of an element in the gather of the forward pass and of the recomputation, and in that of a second copy for input
    gradients in the backward pass; None where the first copy serves both."""

    forward: Fraction
    backward: Fraction | None = None


def gathers(recipe: Recipe | None, weight: QuantizedWeight | None, width: int) -> Gathers:
    """The gathers of a weight of ``width`` bytes in its gather dtype. ``recipe``: one that gathers codes and scales, or None.

    A block that has another extent for each product needs a copy for
    each, and so does a product that is not quantized.
    """
    if recipe is None or weight is None:
        return Gathers(forward=Fraction(width))
    operands = {one.product: one for one in weight.operands if one.operand == "weight"}
    forward, backward = operands.get("output"), operands.get("input_gradient")
    sent = tuple(Fraction(width) if one is None else _bytes_of(one) for one in (forward, backward))
    return Gathers(forward=sent[0], backward=None if _same(forward, backward) else sent[1])


def _same(first: QuantizedOperand | None, second: QuantizedOperand | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.quantizer.dtype == second.quantizer.dtype and first.extents == second.extents


def _bytes_of(operand: QuantizedOperand) -> Fraction:
    """Codes and scales of an element. The scale of an entire tensor is of all devices, and is not sent with its shards."""
    quantizer = operand.quantizer
    sizes = [operand.dims[dim].size if extent is None else extent for dim, extent in operand.extents.items()]
    entire = all(extent is None for extent in operand.extents.values())
    scales = Fraction(0) if entire else Fraction(bits_of(quantizer.scale.dtype), prod(sizes))
    return (bits_of(quantizer.dtype) + scales) / 8
