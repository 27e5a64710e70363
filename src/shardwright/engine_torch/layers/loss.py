"""Cross-entropy of a rank's own tokens, over a vocabulary that may be sharded.

B rows, L tokens, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

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
    return _Summed.apply(logits_BLV, targets_BL, valid_BL, peers)  # pyright: ignore[reportReturnType]


def with_cotangent(
    logits_BLV: torch.Tensor, targets_BL: torch.Tensor, valid_BL: torch.Tensor, peers: Peers = ALONE
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, and its derivative by the logits. Nothing is recorded for a backward pass."""
    found = _log_probabilities(logits_BLV.to(computed("loss", logits_BLV.dtype)), targets_BL, peers)
    return found.loss(valid_BL), _cotangent(found.of_all_BLV.exp_(), found, valid_BL)


class _LogProbabilities(NamedTuple):
    """Of each entry of this rank, and of each token's target; the target's index among the entries of this rank, and whether it is one of
    them. One tensor is as large as the logits."""

    of_all_BLV: torch.Tensor
    of_target_BL: torch.Tensor
    own_BL: torch.Tensor
    is_own_BL: torch.Tensor

    def loss(self, valid_BL: torch.Tensor) -> torch.Tensor:
        # Not a product: an invalid token's target may have the probability 0.
        return -self.of_target_BL.where(valid_BL, 0.0).sum()


def _log_probabilities(logits_BLV: torch.Tensor, targets_BL: torch.Tensor, peers: Peers) -> _LogProbabilities:
    V = logits_BLV.shape[-1]
    own_BL = targets_BL.long() - peers.index * V
    is_own_BL = (own_BL >= 0) & (own_BL < V)
    own_BL = own_BL.clamp(0, V - 1)
    if peers.group is None:
        of_all_BLV = torch.log_softmax(logits_BLV, dim=-1)
        return _LogProbabilities(of_all_BLV, of_all_BLV.gather(-1, own_BL[..., None])[..., 0], own_BL, is_own_BL)
    largest_BL = logits_BLV.amax(dim=-1)
    dist.all_reduce(largest_BL, op=dist.ReduceOp.MAX, group=peers.group)
    # Not a product: where the target is another rank's, the logit here may be that of padding, minus infinity.
    target_BL = logits_BLV.gather(-1, own_BL[..., None])[..., 0].where(is_own_BL, 0.0)
    both_2BL = torch.stack([(logits_BLV - largest_BL[..., None]).exp_().sum(dim=-1), target_BL])
    dist.all_reduce(both_2BL, group=peers.group)
    log_sum_BL = both_2BL[0].log() + largest_BL
    return _LogProbabilities(logits_BLV - log_sum_BL[..., None], both_2BL[1] - log_sum_BL, own_BL, is_own_BL)


def _cotangent(probabilities_BLV: torch.Tensor, found: _LogProbabilities, valid_BL: torch.Tensor) -> torch.Tensor:
    """The derivative by the logits, in the place of the probabilities."""
    ones_BL1 = found.is_own_BL[..., None].to(probabilities_BLV.dtype)
    probabilities_BLV.scatter_add_(-1, found.own_BL[..., None], -ones_BL1)
    return probabilities_BLV.mul_(valid_BL[..., None])


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_BLV: torch.Tensor, targets_BL: torch.Tensor, valid_BL: torch.Tensor, peers: Peers):
        found = _log_probabilities(logits_BLV, targets_BL, peers)
        ctx.save_for_backward(*found, valid_BL)
        return found.loss(valid_BL)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, valid_BL = ctx.saved_tensors
        found = _LogProbabilities(*saved)
        return _cotangent(found.of_all_BLV.exp(), found, valid_BL).mul_(cotangents[0]), None, None, None
