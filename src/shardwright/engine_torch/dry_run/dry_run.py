"""A step without devices: the real model, step and optimizer, as rank 0 of a fake process group, without values.

Only the shapes of tensors are known, so each expert is assumed to get the same number of rows. Everything else is what a rank
would do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from shardwright.core.boxes.boxes import shard_box
from shardwright.core.model.optimizer import AVERAGE
from shardwright.core.plan.gate import require_lowered
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.quantization.delayed import FACTOR, HISTORY
from shardwright.engine_torch.dry_run.counting import CountedCollective, Counting, of_weights
from shardwright.engine_torch.io.dtypes import torch_dtype
from shardwright.engine_torch.io.mesh import ranks_of
from shardwright.engine_torch.io.private import imagined_ranks, without_values
from shardwright.engine_torch.lowering.links import links_of
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.precision.delayed import Kept
from shardwright.engine_torch.training.state import State, shape_in_update
from shardwright.engine_torch.training.step import changed
from shardwright.models.parts.architecture import LatentAttention
from shardwright.training.optimizer import OptimizerOptions, decayed_names

MICROBATCHES = 2
"""At most this many are run: the first, and the last one, which sums over replicas. All others are like the first."""

FIELDS = ("tokens", "positions", "segments", "targets")


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What rank 0 does in a step: its collectives, and how often each; its bytes at rest, and its peak memory.

    ``peak_bytes``: weights, gradients, moments, averages, the batch and all activations, without what an allocator or a
    kernel needs in addition. ``even``: all experts were assumed to get the same number of rows. ``whole_scores``: attention
    held the scores of all queries and keys, as PyTorch does on a CPU where value heads and key heads differ in width.
    """

    collectives: tuple[tuple[CountedCollective, int], ...]
    weights_bytes: int
    gradients_bytes: int
    moments_bytes: int
    average_bytes: int
    batch_bytes: int
    peak_bytes: int
    even: bool
    whole_scores: bool


def dry_run(plan: Plan) -> DryRun:
    """One step of ``plan`` on rank 0 of its mesh. No other rank exists, and nothing is computed.

    Raises FindingsError for a plan with errors.
    """
    require_lowered(plan)
    num = plan.request.microbatches
    run = min(num, MICROBATCHES)
    rows = plan.request.batch * run // num
    shorter = make_plan(replace(plan.request, microbatches=run, batch=rows))
    with imagined_ranks(plan.mesh.num_devices):
        found = _run(shorter)
    collectives = tuple(
        (one, count * num // run if one.phase not in (None, "update") else count) for one, count in found.collectives
    )
    return replace(found, collectives=collectives, batch_bytes=found.batch_bytes * num // run)


def evenly(counts: torch.Tensor, total: int) -> list[int]:
    """``total`` divided into as many integers as there are counts, as equal as possible.

    >>> evenly(torch.zeros(4), 10)
    [3, 3, 2, 2]
    """
    each, more = divmod(total, counts.shape[0])
    return [each + (number < more) for number in range(counts.shape[0])]


def _run(plan: Plan) -> DryRun:
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
        sizes = {key: gradient.element_size() for key, gradient in gradients.by_key.items()}
        held = _held_elements(model)
        del norm
    kept = {prefix: _bytes(arrays.values()) for prefix, arrays in state.kept.items()}
    averages = kept.pop(AVERAGE.prefix, 0)
    return DryRun(
        collectives=tuple(counting.counted.items()),
        weights_bytes=_bytes(weights) + _bytes(model.frozen.values()),
        gradients_bytes=sum(held[key] * size for key, size in sizes.items()),
        moments_bytes=sum(kept.values()),
        average_bytes=averages,
        batch_bytes=_bytes(batch.values()),
        peak_bytes=counting.held.peak,
        even=any(stack.experts for stack in plan.request.table.architecture.stacks),
        whole_scores=isinstance(plan.request.table.architecture.attention, LatentAttention),
    )


def _state(model: Model) -> State:
    state = State(model, 0)
    parameters = model.parameters()
    for kept in model.plan.request.kept:
        for one in model.weights:
            shape = shape_in_update(one, local_of(parameters[one.key]), model.ranks)
            state.kept[kept.prefix][one.key] = torch.zeros(shape, dtype=torch_dtype(str(kept.dtype)))
    for row in model.plan.weights:
        if model.plan.request.table.weight(row.name).frozen:
            shape = row.shape if row.stack is None else (row.num, *row.shape)
            model.frozen[row.name] = torch.zeros(shape, dtype=torch_dtype(row.dtype))
    boxes = {one.name: shard_box(one.spec, model.plan.mesh, one.shape, 0) for one in model.plan.delayed_tensors}
    arrays = {name: torch.zeros(box.shape) for name, box in boxes.items() if box is not None}
    model.delayed = {
        one.name: Kept.of(arrays[FACTOR + one.name], arrays[HISTORY + one.name]) for one in model.plan.delayed
    }
    return state


def _held_elements(model: Model) -> dict[str, int]:
    """Elements of the gradient of each weight while it is summed over microbatches."""
    held = {key: local_of(one) for key, one in model.parameters().items()}
    for one in model.updated:
        held |= one.held_parts(held)
    return {key: shard.numel() for key, shard in held.items()}


def _batch(plan: Plan) -> Mapping[str, torch.Tensor]:
    box = shard_box(plan.by_name["input.tokens"].in_use, plan.mesh, (plan.request.batch, plan.request.length), 0)
    assert box is not None
    fields = {name: torch.zeros(box.shape, dtype=torch.int32) for name in FIELDS}
    return {**fields, "valid": torch.ones(box.shape, dtype=torch.bool)}


def _bytes(tensors) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
