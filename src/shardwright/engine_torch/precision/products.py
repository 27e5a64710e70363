"""The three products with a weight of which operands are quantized.

A product of two quantized operands is computed in float32 from the values of their codes, on every device: the numbers of a
device with narrow products, whose sums are float32 or wider. It differs from the exact sum of K terms by at most K * 2^-24 of the
sum of their absolute values.

I and O are the input and output widths of a weight.
"""

from __future__ import annotations

import torch

from shardwright.core.recipes.recipe import OPERANDS, Operand, Product
from shardwright.engine_torch.io.dtypes import kept
from shardwright.engine_torch.io.layer_io import ALONE, LowPrecision
from shardwright.engine_torch.precision.operands import values


def quantized_product(x: torch.Tensor, weight_OI: torch.Tensor, what: str, low: LowPrecision) -> torch.Tensor:
    """Tokens, whose features are the last dim, times a weight, and the two products of the backward pass, as a recipe has them.

    The last dim of tokens has the blocks of the weight's gradient.
    """
    return _Quantized.apply(x, weight_OI, what, low)  # pyright: ignore[reportReturnType]


class _Quantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, weight_OI: torch.Tensor, what: str, low: LowPrecision) -> torch.Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.low = low
        y = _multiplied("output", x.flatten(0, -2), weight_OI, low)
        return y.view(*x.shape[:-1], weight_OI.shape[0]).to(kept(what, x.dtype))

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight_OI = ctx.saved_tensors
        cotangent = cotangents[0].to(kept("cotangent", x.dtype))
        d_x = _multiplied("input_gradient", cotangent.flatten(0, -2), weight_OI.T, ctx.low)
        d_weight_IO = _multiplied(
            "weight_gradient", x.movedim(-1, 0), cotangent.movedim(-1, 0), ctx.low, contracted_dims=x.dim() - 1
        )
        return d_x.view(x.shape).to(x.dtype), d_weight_IO.T.to(weight_OI.dtype), None, None


def _multiplied(
    name: Product, x: torch.Tensor, y: torch.Tensor, low: LowPrecision, *, contracted_dims: int = 1
) -> torch.Tensor:
    """The sums over the last ``contracted_dims`` dims of two operands: in float32, or else in the operands' dtype."""
    places: list[tuple[Product, Operand]] = [(name, operand) for operand in OPERANDS[name]]
    all_narrow = all(place in low.quantizers for place in places)
    operands = []
    for place, operand in zip(places, (x, y), strict=True):
        quantizer = low.quantizers.get(place)
        if quantizer is None:
            operands.append(operand)
            continue
        narrow = values(operand, quantizer, low.amax_peers.get(place, ALONE), contracted_dims)
        operands.append(narrow if all_narrow else narrow.to(operand.dtype))
    x, y = (operand.flatten(1) for operand in operands)
    return x @ y.T
