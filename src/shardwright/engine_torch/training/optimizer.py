"""AdamW with warm-up, cosine decay and clipping by the global norm, on a rank's local shards.

The formulas are those of the JAX engine, in the same order: a weight's update is the rate times (the first moment over the
root of the second, both bias-corrected, plus the decay times the weight).
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
"""The smallest norm that is divided by."""


def global_norm(gradients: Shards, sharded_by: Mapping[str, tuple[str, ...]], mesh: Mesh, ranks: Ranks) -> torch.Tensor:
    """The norm of all gradients. ``sharded_by``: the axes that shard each of them; replicas count once.

    Each rank sums the squares of the gradients that the same axes shard; each sum is then all-reduced over those axes only.
    """
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        by_axes.setdefault(mesh.larger_than_one(mesh.in_mesh_order(sharded_by[key])), []).append(gradient)
    total = torch.zeros((), device=ranks.device)
    for axes, shards in sorted(by_axes.items()):
        square = torch.stack([shard.to(computed("clipping", shard.dtype)).square().sum() for shard in shards]).sum()
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
    """One step, in place. ``step``: the number of steps done. Moments and weights keep their own dtypes."""
    factor = torch.clamp(options.clip / norm.clamp(min=TINY), max=1.0)
    rate, count = learning_rate(options, step), step + 1
    correction_1, correction_2 = 1 - BETA_1**count, 1 - BETA_2**count
    for key, weight in weights.items():
        gradient = gradients[key].to(computed("clipping", gradients[key].dtype)) * factor
        wide = computed("moments", first[key].dtype)
        mu = first[key].to(wide) * BETA_1 + gradient * (1 - BETA_1)
        nu = second[key].to(wide) * BETA_2 + gradient.square() * (1 - BETA_2)
        update = (mu / correction_1) / ((nu / correction_2).sqrt() + EPSILON)
        if key in decayed:
            update = update + options.weight_decay * weight.to(update.dtype)
        weight.copy_(weight.to(computed("update", weight.dtype)) - rate * update)
        first[key].copy_(mu)
        second[key].copy_(nu)
