"""One training step of a rank: loss, gradients, clipping, the optimizer, and the routing bias.

Gradients are summed over all tokens of the global step and divided once, by their count, so neither microbatches nor ranks
change a result. ``fully_shard`` sums the gradients of its weights: it reduce-scatters in every microbatch, and all-reduces over
replicas in the last one. Gradients of other weights with replicas are summed after that, in one collective per set of axes. Where the
update of weights is sharded, their gradients are reduce-scattered, a rank updates its own parts, and the parts are gathered.

Z layers of a stack with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.experts.moe import MoeCounts
from shardwright.engine_torch.experts.routing import updated_bias
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.layer_io import Site
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.model import Batch, Model
from shardwright.engine_torch.precision.delayed import reduce_amaxes
from shardwright.engine_torch.training.optimizer import apply_gradients, global_norm
from shardwright.engine_torch.training.state import State
from shardwright.runs.metrics.records import StepMetrics
from shardwright.training.optimizer import BIAS_RATE, OptimizerOptions, decayed_names


class Gradients(NamedTuple):
    """The mean loss, a rank's local shard of its gradient by parameter, the valid tokens, and the counts of the experts by stack."""

    loss: torch.Tensor
    by_key: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    counts: Mapping[str, MoeCounts]


def gradients_of(model: Model, batch: Batch) -> Gradients:
    """The gradient of the mean loss over the valid tokens of the global step. ``batch``: a rank's local shard, BL.

    Microbatch i has every ``num``-th of the rank's rows, from row i.
    """
    plan, ranks = model.plan, model.ranks
    num = plan.request.microbatches
    tokens = _summed(batch["valid"].sum(), ranks, plan.by_name["input.valid"].in_use.axes)
    loss = torch.zeros((), device=ranks.device)
    counted: dict[str, list[MoeCounts]] = {}
    for number in range(num):
        _sum_replicas(model, last=number == num - 1)
        model.moment = replace(model.moment, microbatch=number)
        result = model({name: array[number::num] for name, array in batch.items()})
        with _scattered(model):
            result.loss.backward()
        loss += result.loss.detach()
        for stack, counts in result.counts.items():
            fields = zip(*counts, strict=True)
            counted.setdefault(stack, []).append(MoeCounts(*(torch.stack(layers) for layers in fields)))
    _sum_late(model)
    count = tokens.clamp(min=1).to(torch.float32)
    parameters = model.parameters()
    gradients = {}
    scattered = {key for one in model.updated if one.in_microbatches for key in one.keys}
    for key, parameter in parameters.items():
        if key not in scattered:
            found = parameter.grad
            gradients[key] = local_of(found) if found is not None else torch.zeros_like(local_of(parameter))
        parameter.grad = None
    for one in model.updated:
        gradients |= reduce_updates(one, gradients)
    by_key = {key: mean_of(gradients.pop(key), count) for key in parameters}
    axes = plan.by_name["router.grouped"].in_use.axes if counted else ()
    return Gradients(
        loss=_summed(loss, ranks, plan.by_name["logits.targets"].in_use.axes) / count,
        by_key=by_key,
        tokens=tokens,
        counts={
            stack: MoeCounts(
                *(_summed(torch.stack(counts).sum(dim=0), ranks, axes) for counts in zip(*microbatches, strict=True))
            )
            for stack, microbatches in counted.items()
        },
    )


def mean_of(gradient: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A gradient summed over tokens, divided by their ``count`` (float32), in its own dtype."""
    return (gradient.to(computed("mean", gradient.dtype)) / count).to(gradient.dtype)


def train_step(plan: Plan, options: OptimizerOptions, seed: int = 0) -> Callable[[State, Batch], StepMetrics]:
    """``step(state, batch)``: the state is changed in place. ``seed``: of the run, for random numbers of products."""
    decayed = decayed_names(plan)

    def step(state: State, batch: Batch) -> StepMetrics:
        state.model.moment = Site(seed=seed)
        gradients, norm = changed(state, batch, options, decayed)
        lost = {
            what: sum(int(getattr(counts, what).sum()) for counts in gradients.counts.values())
            for what in ("dropped", "overflow")
        }
        return StepMetrics(loss=float(gradients.loss), grad_norm=float(norm), tokens=int(gradients.tokens), **lost)

    return step


def changed(
    state: State, batch: Batch, options: OptimizerOptions, decayed: Collection[str]
) -> tuple[Gradients, torch.Tensor]:
    """Change the state in place; return the gradients and their norm. ``decayed``: weights by name. No value is read to the host."""
    model = state.model
    model.moment = replace(model.moment, step=state.step)
    gradients = gradients_of(model, batch)
    sharded_by = {one.key: one.in_update.axes for one in model.weights}
    norm = global_norm(gradients.by_key, sharded_by, model.plan.mesh, model.ranks)
    weights = {key: local_of(one).detach() for key, one in model.parameters().items()}
    parts = {key: part for one in model.updated for key, part in one.own_parts(weights).items()}
    apply_gradients(
        {**weights, **parts},
        gradients.by_key,
        state.kept,
        step=state.step,
        norm=norm,
        options=options,
        decayed={one.key for one in model.weights if one.weight in decayed},
        optimizer=model.plan.request.optimizer,
        shared=state.shared,
        average=model.plan.request.average,
    )
    for one in model.updated:
        gather_updates(one, weights)
    for name, bias_ZE in model.frozen.items():
        stack = model.plan.by_name[name].stack
        assert stack is not None, name
        model.frozen[name] = updated_bias(bias_ZE, gradients.counts[stack].by_expert, BIAS_RATE)
    state.step += 1
    update_delayed(model, state.step)
    return gradients, norm


def update_delayed(model: Model, step: int) -> None:
    """Reduce the amaxes of a step, and go on to the factors after it. ``step``: its number, from 1."""
    recipe = model.plan.request.precision
    if recipe is None or recipe.history is None:
        return
    kept = [(one, model.delayed[one.name]) for one in model.plan.delayed]
    reduce_amaxes(kept, model.ranks.peers)
    for scale, one in kept:
        one.follow(scale.operand.quantizer, recipe.history, step)


def reduce_updates(one: Updated, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The gradients of a group whose update is sharded, after the last microbatch."""
    return one.reduced(gradients)


def gather_updates(one: Updated, weights: Mapping[str, torch.Tensor]) -> None:
    """Make the weights of such a group whole after their update."""
    one.gather(weights)


@contextmanager
def _scattered(model: Model) -> Iterator[None]:
    """A backward pass in which the gradients of a layer are scattered as soon as all are made, if the layout says so."""
    groups = [one for one in model.updated if one.in_microbatches]
    if not groups:
        yield
        return
    parameters = model.at_rest()

    def scatter(one: Updated, key: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None, key
        gradient, parameter.grad = local_of(parameter.grad), None
        one.scatter(key, gradient)

    handles = [
        parameters[key].register_post_accumulate_grad_hook(partial(scatter, one, key))
        for one in groups
        for key in one.keys
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _sum_replicas(model: Model, *, last: bool) -> None:
    for module in model.sharded():
        module.set_requires_all_reduce(last, recurse=False)


def _sum_late(model: Model) -> None:
    """Sum the gradients that are still partial over replicas, in one collective per set of axes and dtype."""
    parameters = model.parameters()
    waiting: dict[tuple[tuple[str, ...], torch.dtype], list[torch.Tensor]] = {}
    for group in model.groups:
        for one in group.weights:
            parameter, axes = parameters[one.key], group.other_replicas(one)
            if axes:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local_of(parameter.grad)
                waiting.setdefault((axes, gradient.dtype), []).append(gradient)
    # In the order of the weights, which is the same on all ranks.
    for (axes, _), gradients in waiting.items():
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=model.ranks.peers(axes).group)
        summed = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total.view_as(gradient))


def _summed(array: torch.Tensor, ranks: Ranks, axes: tuple[str, ...]) -> torch.Tensor:
    peers = ranks.peers(ranks.mesh.in_mesh_order(axes))
    if peers.group is not None:
        array = array.clone()
        dist.all_reduce(array, group=peers.group)
    return array
