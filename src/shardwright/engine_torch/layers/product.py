"""Products of tokens and weights, whose result may have a wider dtype than the operands.

I and O are the input and output widths of a weight.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
from torch.nn import functional

from shardwright.engine_torch.io.dtypes import kept
from shardwright.engine_torch.io.layer_io import LowPrecision
from shardwright.engine_torch.precision.coded import Coded
from shardwright.engine_torch.precision.operands import Amaxes
from shardwright.engine_torch.precision.products import quantized_product

NONE_AGREED: Amaxes = MappingProxyType({})


def weight_product(
    x: torch.Tensor,
    weight_OI: torch.Tensor | Coded,
    low: LowPrecision | None = None,
    amaxes: Amaxes = NONE_AGREED,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Tokens times a weight, outputs first, in the dtypes of ``core/model/precision.py``, or of operands that are quantized as ``low`` says;
    ``amaxes``: of the input, where several weights multiply it (``input_amaxes``). ``dtype``: the result's own."""
    dtype = kept("product", x.dtype) if dtype is None else dtype
    if low is not None:
        return quantized_product(x, weight_OI, dtype, low, amaxes)
    assert not isinstance(weight_OI, Coded), weight_OI
    if dtype == x.dtype:
        return functional.linear(x, weight_OI)
    return product(x, weight_OI.T, dtype)


def wide_product(x: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """The same of a weight that is in use in a dtype of its own: of exact operands, in that dtype."""
    return functional.linear(x.to(weight_OI.dtype), weight_OI)


def product(x: torch.Tensor, y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x @ y`` in a dtype, where ``y`` is one matrix, or both are batches of matrices along dim 0.

    The cotangent is cast to the operands' dtype, so that no product is of two dtypes.
    """
    if dtype == x.dtype:
        return x @ y
    assert dtype == torch.float32, dtype
    return _Wide.apply(x, y)  # pyright: ignore[reportReturnType]


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return _wide(x, y)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, y = ctx.saved_tensors
        cotangent = cotangents[0].to(kept("cotangent", x.dtype))
        if y.dim() == 2:
            return cotangent @ y.mT, x.flatten(0, -2).mT @ cotangent.flatten(0, -2)
        return cotangent @ y.mT, x.mT @ cotangent


@torch.library.custom_op("shardwright::wide_product", mutates_args=())
def _wide(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """``x @ y`` in float32. A custom operation, so that a dry run counts what a GPU does, which has no wide operands."""
    if not x.is_cuda:
        return x.float() @ y.float()
    if y.dim() == 2:
        return torch.mm(x.flatten(0, -2), y, out_dtype=torch.float32).view(*x.shape[:-1], y.shape[1])
    return torch.bmm(x, y, out_dtype=torch.float32)


@_wide.register_fake
def _(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-1]), dtype=torch.float32)


def add_product(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """Add the product of two matrices to a matrix of their dtype or of float32, in place. The product itself is not rounded."""
    if total.dtype == x.dtype:
        total.addmm_(x, y)
    else:
        _add_wide(total, x, y)


@torch.library.custom_op("shardwright::add_wide_product", mutates_args=("total",))
def _add_wide(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    """As ``_wide``, added to ``total``."""
    if x.is_cuda:
        torch.addmm(total, x, y, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(x.float(), y.float())


@_add_wide.register_fake
def _(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> None:
    pass
