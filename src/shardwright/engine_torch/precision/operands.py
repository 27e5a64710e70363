"""The operands of a product as they are after quantization, and the ranks that agree on an amax."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwright.core.recipes.formula import Quantized, Shares, dequantize, quantize, shared_by
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_torch.io.layer_io import ALONE
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.precision.arrays import ARRAYS


def quantized(x: torch.Tensor, quantizer: Quantizer, peers: Peers = ALONE, contracted_dims: int = 1) -> Quantized:
    """Codes and scales of a rank's shard of an operand, ``[..., other, *contracted]``.

    ``peers``: the ranks that hold parts of what shares a scale.
    """

    def agree(amax: torch.Tensor, of: Shares) -> torch.Tensor:
        if peers.group is not None and of == shared_by(quantizer):
            amax = amax.contiguous()
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=peers.group)
        return amax

    return quantize(x.detach(), quantizer, ARRAYS, contracted_dims=contracted_dims, agree=agree)


def values(x: torch.Tensor, quantizer: Quantizer, peers: Peers = ALONE, contracted_dims: int = 1) -> torch.Tensor:
    """The values of the operand's codes, float32: what a product of narrow operands multiplies."""
    codes = quantized(x, quantizer, peers, contracted_dims)
    return dequantize(codes, x.shape, quantizer, ARRAYS, contracted_dims=contracted_dims)
