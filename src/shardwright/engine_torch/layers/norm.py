"""RMS normalization."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.io.fused import fused
from shardwright.engine_torch.io.layer_io import halves_wanted


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, *, split: bool = False) -> torch.Tensor:
    """``x`` over its root mean square along the last dim, times ``scale``. Besides these two, one number for each token is saved for the
    backward pass: autograd would save two wide tensors as large as ``x``. ``split``: the backward pass is made in halves."""
    return _Normed.apply(x, scale, eps, split)  # pyright: ignore[reportReturnType]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, eps: float, split: bool) -> torch.Tensor:
        normed, factor = fused(_normed)(x, scale, eps, computed("norm", x.dtype), kept("norm", x.dtype))
        ctx.split = split
        ctx.save_for_backward(x, scale, factor)
        return normed

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scale, factor = ctx.saved_tensors
        of_input, of_weight = halves_wanted(ctx, split=ctx.split)
        d_x = fused(_of_input)(cotangents[0], x, scale, factor) if of_input and ctx.needs_input_grad[0] else None
        d_scale = (
            fused(_of_scale)(cotangents[0], x, factor, scale.dtype) if of_weight and ctx.needs_input_grad[1] else None
        )
        return d_x, d_scale, None, None


def _normed(
    x: torch.Tensor, scale: torch.Tensor, eps: float, dtype: torch.dtype, narrow: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and one over the root mean square of each token, in the dtype in which a norm is computed."""
    wide = x.to(dtype)
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * factor).mul_(scale.to(dtype)).to(narrow), factor


def _of_input(cotangent: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    of_normed = cotangent.to(factor.dtype) * scale.to(factor.dtype)
    wide = x.to(factor.dtype)
    of_square = (of_normed * wide).sum(dim=-1, keepdim=True) * (-0.5 * factor.pow(3)) / x.shape[-1]
    return of_normed.mul_(factor).add_(wide * (2 * of_square)).to(x.dtype)


def _of_scale(cotangent: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    each = cotangent.to(factor.dtype) * (x.to(factor.dtype) * factor)
    return each.flatten(0, -2).sum(dim=0).to(dtype)
