"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from shardwright.engine_torch.io.fused import fused
from shardwright.engine_torch.io.layer_io import InUse, Links
from shardwright.engine_torch.io.recomputation import named
from shardwright.engine_torch.layers.product import NONE_AGREED, weight_product
from shardwright.engine_torch.precision.operands import Amaxes, input_amaxes


def feed_forward(x_BLM: torch.Tensor, weights: InUse, name: str, links: Links) -> torch.Tensor:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)

    amaxes = input_amaxes([x_BLM], (links.low.get(f"{name}.{of}") for of in ("gate", "up")))

    def product(x: torch.Tensor, of: str, amaxes: Amaxes = NONE_AGREED) -> torch.Tensor:
        return weight_product(x, weights[f"{name}.{of}"], low=links.low.get(f"{name}.{of}"), amaxes=amaxes)

    gate_BLF, up_BLF = (named(product(x_BLM, of, amaxes), f"{name}.{of}") for of in ("gate", "up"))
    hidden_BLF = named(gated(gate_BLF, up_BLF), f"{name}.hidden")
    projected_BLM = named(product(hidden_BLF, "down"), f"{name}.projected")
    return links.move(f"{name}.projected", "residual.stream", projected_BLM)


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
