"""Clipping by the global norm, an optimizer by name, warm-up and cosine decay of its rate, and the average of the weights, on a
rank's local shards. The formulas are those of the JAX engine, in the same order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.model.optimizer import ADAMW, AVERAGE, MASTER, Optimizer
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.training.named_optimizer import change
from shardwright.training.arithmetic import Arithmetic
from shardwright.training.optimizer import OptimizerOptions, average_share, learning_rate
from shardwright.training.optimizers import OPTIMIZERS, is_own

Shards = Mapping[str, torch.Tensor]
TINY = 1e-30
"""The smallest norm that is divided by."""
_PART = 2**16
"""Elements of a part of an update."""

OF_TENSORS = Arithmetic(
    cos=torch.cos,
    least=torch.minimum,
    most=torch.maximum,
    root=torch.sqrt,
    sign=torch.sign,
    exp_less_one=torch.expm1,
    weighted=lambda x, a, y, b: x.mul_(a).add_(y, alpha=b),
)


def global_norm(
    gradients: Shards,
    sharded_by: Mapping[str, tuple[str, ...]],
    mesh: Mesh,
    ranks: Ranks,
    stage_axes: tuple[str, ...] = (),
    by_all: Collection[str] = (),
) -> torch.Tensor:
    """The norm of all gradients. ``sharded_by``: the axes that shard each of them; replicas count once.

    Each rank sums the squares of the gradients that the same axes shard; each sum is then all-reduced over those axes only, and the
    sum of all over ``stage_axes``, along which ranks have different weights, but for those ``by_all``.
    """
    total = _sum_of_squares({k: g for k, g in gradients.items() if k not in by_all}, sharded_by, mesh, ranks)
    if stage_axes:
        dist.all_reduce(total, group=ranks.peers(stage_axes).group)
    if by_all:
        total = total + _sum_of_squares({key: gradients[key] for key in by_all}, sharded_by, mesh, ranks)
    return total.sqrt()


def _sum_of_squares(
    gradients: Shards, sharded_by: Mapping[str, tuple[str, ...]], mesh: Mesh, ranks: Ranks
) -> torch.Tensor:
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for key, gradient in gradients.items():
        by_axes.setdefault(mesh.larger_than_one(mesh.in_mesh_order(sharded_by[key])), []).append(gradient)
    total = torch.zeros((), device=ranks.device)
    for axes, shards in sorted(by_axes.items()):
        square = torch.stack([shard.to(computed("clipping", shard.dtype)).square().sum() for shard in shards]).sum()
        if axes:
            dist.all_reduce(square, group=ranks.peers(axes).group)
        total = total + square
    return total


@torch.no_grad()
def apply_gradients(
    weights: Shards,
    gradients: Shards,
    kept: Mapping[str, dict[str, torch.Tensor]],
    *,
    step: int,
    norm: torch.Tensor,
    options: OptimizerOptions,
    decayed: Collection[str],
    optimizer: Optimizer = ADAMW,
    shared: dict[str, torch.Tensor] | None = None,
    average: float | None = None,
    resting: torch.dtype = torch.float32,
) -> None:
    """One step, in place, also of gradients. Where weights are kept in a wider dtype too, those are updated, and the weights rounded. ``step``: the number of steps done. ``kept``: by prefix. It and the weights keep their own dtypes.

    ``shared``: other state of an optimizer of PyTorch. ``average``: how much of the average of the weights a step leaves.
    ``resting``: the dtype of weights that are in none of ``weights``, but in a wider dtype alone.
    """
    rounded, weights = weights, kept.get(MASTER.prefix, weights)
    factor = torch.clamp(options.clip / norm.clamp(min=TINY), max=1.0)
    rate, count = learning_rate(options, step), step + 1
    if is_own(optimizer):
        # A shard of a DTensor is a view, and an optimizer of PyTorch takes leaves only. Detached it is the same memory.
        weights = {key: weight.detach() for key, weight in weights.items()}
        for key in decayed:
            weights[key].mul_(1 - rate * options.weight_decay)
        for gradient in gradients.values():
            gradient.mul_(factor)
        change(optimizer, weights, gradients, kept, {} if shared is None else shared, rate)
    else:
        _update(weights, gradients, kept, factor, rate, count, options, decayed, optimizer)
    if weights is not rounded:
        for key, weight in rounded.items():
            weight.copy_(weights[key])
    if average is not None:
        for key, mean in kept[AVERAGE.prefix].items():
            now = rounded[key] if key in rounded else weights[key].to(resting)
            mean += average_share(average, count) * (now.to(mean.dtype) - mean)


def _update(
    weights: Shards,
    gradients: Shards,
    kept: Mapping[str, Shards],
    factor: torch.Tensor,
    rate: float,
    count: int,
    options: OptimizerOptions,
    decayed: Collection[str],
    optimizer: Optimizer,
) -> None:
    """One step by a formula of ``training/optimizers.py``: ``factor`` clips gradients, ``count`` has this step."""
    formula = OPTIMIZERS[optimizer.name].formula
    prefixes = [one.prefix for one in optimizer.kept]
    for key, weight in weights.items():
        for part, g, *states in _parts([weight, gradients[key], *(kept[prefix][key] for prefix in prefixes)]):
            own = dict(zip(prefixes, states, strict=True))
            wide = {prefix: array.to(computed("moments", array.dtype)) for prefix, array in own.items()}
            gradient = g.to(computed("clipping", g.dtype)).mul_(factor)
            update, after = formula(gradient, wide, count, optimizer.constants, OF_TENSORS)
            if key in decayed:
                is_kept = any(update is one for one in after.values())
                add = update.add if is_kept else update.add_
                update = add(part.to(update.dtype), alpha=options.weight_decay)
            changed = part.to(computed("update", part.dtype)).sub_(update, alpha=rate)
            if changed is not part:
                part.copy_(changed)
            for prefix, array in own.items():
                if after[prefix] is not array:
                    array.copy_(after[prefix])


def _parts(arrays: Sequence[torch.Tensor]) -> Iterable[Sequence[torch.Tensor]]:
    """Arrays of one shape, part by part: a formula is of each element. On a CPU the results of its operations stay in the cache then, and
    an update of 2,048 x 256 elements took a quarter of the time. A dry run, whose tensors have no values, is of a GPU."""
    has_values = type(arrays[0]) in (torch.Tensor, torch.nn.Parameter)
    is_small = arrays[0].numel() <= _PART
    if is_small or arrays[0].device.type != "cpu" or not has_values or not all(one.is_contiguous() for one in arrays):
        return [arrays]
    return zip(*(one.view(-1).split(_PART) for one in arrays), strict=True)
