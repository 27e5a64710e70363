"""Cross-entropy of a rank's own tokens, over a vocabulary that may be sharded.

B rows, L tokens, V vocabulary entries of this rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.layer_io import ALONE
from shardwright.engine_torch.io.mesh import Peers


def summed_cross_entropy(
    logits_BLV: torch.Tensor, targets_BL: torch.Tensor, valid_BL: torch.Tensor, peers: Peers = ALONE
) -> torch.Tensor:
    """Sum over the valid tokens of minus the log-probability of the target.

    ``peers``: the ranks that share the vocabulary; the result is the same on all of them. A sharded vocabulary is never
    gathered.
    """
    logits_BLV = logits_BLV.to(computed("loss", logits_BLV.dtype))
    if peers.group is None:
        loss_BL = functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten().long(), reduction="none")
        return (loss_BL * valid_BL.flatten()).sum()
    return _OverRanks.apply(logits_BLV, targets_BL, valid_BL, peers)  # pyright: ignore[reportReturnType]


class _OverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_BLV, targets_BL, valid_BL, peers: Peers):
        largest_BL = logits_BLV.amax(dim=-1)
        dist.all_reduce(largest_BL, op=dist.ReduceOp.MAX, group=peers.group)
        V = logits_BLV.shape[-1]
        own_BL = targets_BL.long() - peers.index * V
        is_own_BL = (own_BL >= 0) & (own_BL < V)
        own_BL = own_BL.clamp(0, V - 1)
        # Not a product: where the target is another rank's, the logit here may be that of padding, minus infinity.
        target_BL = logits_BLV.gather(-1, own_BL[..., None])[..., 0].where(is_own_BL, 0.0)
        both_2BL = torch.stack([(logits_BLV - largest_BL[..., None]).exp().sum(dim=-1), target_BL])
        dist.all_reduce(both_2BL, group=peers.group)
        log_sum_BL = both_2BL[0].log() + largest_BL
        ctx.save_for_backward(logits_BLV, log_sum_BL, own_BL, is_own_BL, valid_BL)
        return ((log_sum_BL - both_2BL[1]) * valid_BL).sum()

    @staticmethod
    def backward(ctx, *cotangents):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_BLV, log_sum_BL, own_BL, is_own_BL, valid_BL = ctx.saved_tensors
        cotangent_BLV = (logits_BLV - log_sum_BL[..., None]).exp()
        cotangent_BLV.scatter_add_(-1, own_BL[..., None], -is_own_BL[..., None].to(cotangent_BLV.dtype))
        return cotangent_BLV * (valid_BL[..., None] * cotangents[0]), None, None, None
