"""RMS normalization."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.io.fused import fused
from shardwright.engine_torch.io.layer_io import halves_wanted


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float, *, split: bool = False) -> torch.Tensor:
    """``x`` over its root mean square along the last dim, times ``scale``. Besides these two, one number for each token is saved for the
    backward pass: autograd would save two wide tensors as large as ``x``.

    Two functions, since a ``split`` backward pass asks for the gradient of ``scale`` alone, and a function makes all that it has.
    """
    normed, factor = _Normed.apply(x, eps)  # pyright: ignore[reportGeneralTypeIssues]
    return _Scaled.apply(normed, scale, x.detach(), factor, split)  # pyright: ignore[reportReturnType]


class _Normed(torch.autograd.Function):
    """``x`` over its root mean square, in the dtype that a norm is computed in; and one over that root."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        normed, factor = fused(_normed)(x, eps, computed("norm", x.dtype))
        ctx.save_for_backward(x, factor)
        ctx.mark_non_differentiable(factor)
        return normed, factor

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, factor = ctx.saved_tensors
        return fused(_of_input)(cotangents[0], x, factor), None


class _Scaled(torch.autograd.Function):
    """``normed * scale``, in the dtype of ``x``. ``normed`` is made again of ``x`` and ``factor`` in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, normed: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, split: bool
    ) -> torch.Tensor:
        ctx.split = split
        ctx.save_for_backward(scale, x, factor)
        return fused(_scaled)(normed, scale, kept("norm", x.dtype))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale, x, factor = ctx.saved_tensors
        of_input, of_weight = halves_wanted(ctx, split=ctx.split)
        of_normed = fused(_of_normed)(cotangents[0], scale, factor.dtype) if of_input else None
        of_scale = fused(_of_scale)(cotangents[0], x, factor, scale.dtype) if of_weight else None
        return of_normed, of_scale, None, None, None


def _normed(x: torch.Tensor, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = x.to(dtype)
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide * factor, factor


def _of_input(of_normed: torch.Tensor, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    wide = x.to(factor.dtype)
    of_factor = (of_normed * wide).sum(dim=-1, keepdim=True)
    of_square = of_factor * (-0.5 * factor.pow(3)) / x.shape[-1]
    return (of_normed * factor + 2 * of_square * wide).to(x.dtype)


def _scaled(normed: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (normed * scale.to(normed.dtype)).to(dtype)


def _of_normed(cotangent: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cotangent.to(dtype) * scale.to(dtype)


def _of_scale(cotangent: torch.Tensor, x: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    each = cotangent.to(factor.dtype) * (x.to(factor.dtype) * factor)
    return each.flatten(0, -2).sum(dim=0).to(dtype)
