"""A step without devices: the real model, step and optimizer, as rank 0 of a world that is imagined, without values.

What a tensor holds is not known, only its shape: so the rows that go to each expert are taken to be alike. Everything else
is what a rank would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_torch.dry_run.counting import Counting, Seen, of_weights
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.io.private import imagined_ranks, without_values
from shardwright.engine_torch.lowering.links import links_of
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.training.state import State
from shardwright.engine_torch.training.step import changed
from shardwright.models.parts.architecture import LatentAttention
from shardwright.training.optimizer import OptimizerOptions, decayed_names

MICROBATCHES = 2
"""So many are walked through at most: the first, and the last one, that sums replicas. Each other is like the first."""

FIELDS = ("tokens", "positions", "segments", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What rank 0 does in a step: collectives, and how often each; bytes at rest, and the most that it holds at a time.

    ``peak_bytes``: weights, gradients, moments, the batch and all that is made of them, without what an allocator or a
    kernel needs beside it. ``even``: rows were taken to go to all experts alike. ``whole_scores``: attention held the scores
    of all queries and keys, as PyTorch does on a CPU where heads of values are not as wide as those of keys.
    """

    collectives: tuple[tuple[Seen, int], ...]
    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    batch_bytes: int
    peak_bytes: int
    even: bool
    whole_scores: bool


def dry_run(plan: Plan) -> DryRun:
    """One step of ``plan`` on rank 0 of its mesh. No rank is there, and nothing is computed.

    Raises FindingsError for a plan with errors.
    """
    require_lowered(plan)
    num = plan.request.microbatches
    walked = min(num, MICROBATCHES)
    rows = plan.request.batch * walked // num
    shorter = make_plan(replace(plan.request, microbatches=walked, batch=rows))
    with imagined_ranks(plan.mesh.num_devices):
        found = _walked(shorter)
    collectives = tuple(
        (one, count * num // walked if one.phase not in (None, "update") else count) for one, count in found.collectives
    )
    return replace(found, collectives=collectives, batch_bytes=found.batch_bytes * num // walked)


def evenly(counts: torch.Tensor, total: int) -> list[int]:
    """``total`` in as many parts as there are counts, as equal as may be.

    >>> evenly(torch.zeros(4), 10)
    [3, 3, 2, 2]
    """
    each, more = divmod(total, counts.shape[0])
    return [each + (number < more) for number in range(counts.shape[0])]


def _walked(plan: Plan) -> DryRun:
    ranks = ranks_of(plan, torch.device("cpu"))
    links = links_of(plan, ranks)
    links = replace(links, experts=replace(links.experts, how_many=evenly))
    model = Model(plan, links, ranks, weights_on=torch.device("meta"))
    options = OptimizerOptions(steps=1, lr=1e-4, warmup=0, weight_decay=0.1, clip=1.0)
    counting = Counting(plan.mesh, of_weights(model.groups, plan.mesh))
    with without_values(), counting, counting.held.watching_sizes():
        model.root.to_empty(device=ranks.device)
        state = _state(model)
        weights = [local_of(one) for one in model.parameters().values()]
        batch = _batch(plan)
        gradients, norm = changed(state, batch, options, decayed_names(plan))
        given = list(gradients.by_key.values())
        del norm
    moments = [*state.first.values(), *state.second.values()]
    return DryRun(
        collectives=tuple(counting.seen.items()),
        weights_bytes=_bytes(weights) + _bytes(model.frozen.values()),
        gradients_bytes=_bytes(given),
        moments_bytes=_bytes(moments),
        batch_bytes=_bytes(batch.values()),
        peak_bytes=counting.held.peak,
        even=any(stack.experts for stack in plan.request.table.architecture.stacks),
        whole_scores=isinstance(plan.request.table.architecture.attention, LatentAttention),
    )


def _state(model: Model) -> State:
    state, moments = State(model, 0), torch_dtype(model.plan.request.moments_dtype)
    for key, parameter in model.parameters().items():
        for kept in (state.first, state.second):
            kept[key] = torch.zeros(local_of(parameter).shape, dtype=moments)
    for row in model.plan.weights:
        if model.plan.request.table.weight(row.name).frozen:
            shape = row.shape if row.stack is None else (row.num, *row.shape)
            model.frozen[row.name] = torch.zeros(shape, dtype=torch_dtype(row.dtype))
    return state


def _batch(plan: Plan) -> Mapping[str, torch.Tensor]:
    box = shard_box(plan.by_name["input.tokens"].in_use, plan.mesh, (plan.request.batch, plan.request.length), 0)
    assert box is not None
    fields = {name: torch.zeros(box.shape, dtype=torch.int32) for name in FIELDS}
    return {**fields, "valid": torch.ones(box.shape, dtype=torch.bool)}


def _bytes(tensors) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
