"""AdamW with warm-up, cosine decay and clipping by the global norm, on a rank's own parts.

The formulas are those of the JAX engine, in the same order: a weight's update is the rate times (the first moment over the
root of the second, both as if they had begun full, plus the decay times the weight).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist

from shardwright.core.mesh.mesh import Mesh
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.training.optimizer import BETA_1, BETA_2, EPSILON, OptimizerOptions, learning_rate

Shards = Mapping[str, torch.Tensor]
TINY = 1e-30
"""The least norm that is divided by."""


def global_norm(gradients: Shards, cut: Mapping[str, tuple[str, ...]], mesh: Mesh, ranks: Ranks) -> torch.Tensor:
    """The norm of all gradients. ``cut``: the axes that cut each of them; replicas count once.

    Squares are summed on each rank, by the axes that cut them, and each sum then over those axes alone.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        by_axes.setdefault(mesh.larger_than_one(mesh.in_mesh_order(cut[key])), []).append(gradient)
    total = torch.zeros((), device=ranks.device)
    for axes, parts in sorted(by_axes.items()):
        square = torch.stack([part.to(computed("clipping", part.dtype)).square().sum() for part in parts]).sum()
        if axes:
            dist.all_reduce(square, group=ranks.peers(axes).group)
        total = total + square
    return total.sqrt()


@torch.no_grad()
def apply_gradients(
    weights: Shards,
    gradients: Shards,
    first: Shards,
    second: Shards,
    *,
    step: int,
    norm: torch.Tensor,
    options: OptimizerOptions,
    decayed: Collection[str],
) -> None:
    """One step, in place. ``step``: those done before. Moments and weights are kept in their own dtypes."""
    factor = torch.clamp(options.clip / norm.clamp(min=TINY), max=1.0)
    rate, count = learning_rate(options, step), step + 1
    full_1, full_2 = 1 - BETA_1**count, 1 - BETA_2**count
    for key, weight in weights.items():
        cotangent = gradients[key].to(computed("clipping", gradients[key].dtype)) * factor
        wide = computed("moments", first[key].dtype)
        mu = first[key].to(wide) * BETA_1 + cotangent * (1 - BETA_1)
        nu = second[key].to(wide) * BETA_2 + cotangent.square() * (1 - BETA_2)
        update = (mu / full_1) / ((nu / full_2).sqrt() + EPSILON)
        if key in decayed:
            update = update + options.weight_decay * weight.to(update.dtype)
        weight.copy_(weight.to(computed("update", weight.dtype)) - rate * update)
        first[key].copy_(mu)
        second[key].copy_(nu)
