"""Gated hidden units (arXiv:2002.05202)."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from shardwright.engine_torch.io.fused import fused


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``. Only these two are saved for the backward pass: autograd would save ``silu(gate)`` too."""
    return _Gated.apply(gate, up)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return fused(_product)(gate, up)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return fused(_of_product)(cotangents[0], *ctx.saved_tensors)


def _product(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate).mul_(up)


def _of_product(cotangent: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The cotangents of ``gate`` and ``up``."""
    of_up = functional.silu(gate).mul_(cotangent)
    return torch.ops.aten.silu_backward(cotangent * up, gate), of_up
