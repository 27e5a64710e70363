"""One training step of a rank: loss, gradients, clipping, the optimizer, and the routing bias.

Gradients are summed over all tokens of the global step and divided once, by their count, so neither microbatches nor ranks
change a result. ``fully_shard`` sums the gradients of its weights: it reduce-scatters in every microbatch, and all-reduces over
replicas in the last one. Gradients of other weights with replicas are summed after that, in one collective per set of axes; then
those of a weight that two stages have. What all ranks know of a step, its loss and its norm, is summed over the stages too. Where the
update of weights is sharded, their gradients are reduce-scattered, a rank updates its own parts, and the parts are gathered.

Z layers of a stack with experts, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from shardwright.core.plan.plan import Plan
from shardwright.core.program.program import Value
from shardwright.core.program.walk import ExpertGroup, LossGroup
from shardwright.engine_torch.experts.experts import MoeCounts
from shardwright.engine_torch.experts.route import updated_bias
from shardwright.engine_torch.io.dtypes import computed, torch_dtype
from shardwright.engine_torch.io.layer_io import Site
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.model.stage import Batch, Stage
from shardwright.engine_torch.precision.delayed import reduce_amaxes
from shardwright.engine_torch.stages.tied import copy_tied, counted_elsewhere, sum_tied
from shardwright.engine_torch.stages.timetable import carry_out
from shardwright.engine_torch.training.optimizer import apply_gradients, global_norm
from shardwright.engine_torch.training.state import State, rest_as_codes
from shardwright.models.layers.decoder import walk_of
from shardwright.runs.metrics.records import StepMetrics
from shardwright.training.optimizer import BIAS_RATE, OptimizerOptions, decayed_names


class Gradients(NamedTuple):
    """The mean loss, a rank's local shard of its gradient by parameter, the valid tokens, and by stage and stack the counts of the
    experts."""

    loss: torch.Tensor
    by_key: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    counts: Mapping[int, Mapping[str, MoeCounts]]


def gradients_of(model: Model, batch: Batch) -> Gradients:
    """The gradient of the mean loss over the valid tokens of the global step. ``batch``: a rank's local shard, BL."""
    plan, ranks, walk = model.plan, model.ranks, walk_of(model.plan.request.table.architecture)

    def axes(value: Value) -> tuple[str, ...]:
        return plan.by_name[value.row].in_use.axes

    tokens = _summed(batch["valid"].sum(), ranks, axes(walk.fields["valid"]))
    carried = carry_out(model, batch)
    for stage in model.stages.values():
        _sum_late(stage)
    sum_tied(model)
    count = tokens.clamp(min=1).to(torch.float32)
    gradients: dict[str, torch.Tensor] = {}
    scattered = {key for one in model.updated if one.in_microbatches for key in one.keys}
    for stage in model.stages.values():
        for key, parameter in stage.parameters().items():
            if key not in scattered and key not in gradients:
                found = parameter.grad
                gradients[key] = local_of(found) if found is not None else torch.zeros_like(local_of(parameter))
            parameter.grad = None
    for one in model.updated:
        gradients |= reduce_updates(one, gradients)
    by_key = {key: mean_of(gradients.pop(key), count) for key in model.parameters()}
    loss = _summed(carried.loss, ranks, axes(walk.groups(LossGroup)[0].loss.inputs[1]))
    if not model.shares_logits:
        loss = _summed(loss, ranks, _stage_axes(plan))
    return Gradients(
        loss=loss / count,
        by_key=by_key,
        tokens=tokens,
        counts={
            number: {
                stack: MoeCounts(*(_summed(one, ranks, axes(walk.groups(ExpertGroup)[0].tokens)) for one in counts))
                for stack, counts in by_stack.items()
            }
            for number, by_stack in carried.counts.items()
        },
    )


def _stage_axes(plan: Plan) -> tuple[str, ...]:
    return () if plan.pipeline is None else plan.pipeline.axes


def mean_of(gradient: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """A gradient summed over tokens, divided by their ``count`` (float32), in its own dtype; in place, if that is the dtype of the mean."""
    return gradient.to(computed("mean", gradient.dtype)).div_(count).to(gradient.dtype)


class TrainStep(Protocol):
    """The state is changed in place, and nothing of it before ``before_update`` was called."""

    def __call__(self, state: State, batch: Batch, before_update: Callable[[], None] = ...) -> StepMetrics: ...


def _no_wait() -> None:
    """No save is under way."""


def train_step(plan: Plan, options: OptimizerOptions, seed: int = 0) -> TrainStep:
    """``step(state, batch)``. ``seed``: of the run, for random numbers of products."""
    decayed = decayed_names(plan)

    def step(state: State, batch: Batch, before_update: Callable[[], None] = _no_wait) -> StepMetrics:
        for stage in state.model.stages.values():
            stage.moment = Site(seed=seed)
        gradients, norm = changed(state, batch, options, decayed, before_update)
        dropped, overflow = _lost(state.model, gradients)
        return StepMetrics(
            loss=float(gradients.loss),
            grad_norm=float(norm),
            tokens=int(gradients.tokens),
            dropped=dropped,
            overflow=overflow,
        )

    return step


def _lost(model: Model, gradients: Gradients) -> tuple[int, int]:
    """The assignments that the layers of all stages dropped, and those that overflowed a buffer."""
    of_layers = [counts for by_stack in gradients.counts.values() for counts in by_stack.values()]
    if not any(stack.experts for stack in model.plan.request.table.architecture.stacks):
        return 0, 0
    sums = [sum(int(getattr(counts, what).sum()) for counts in of_layers) for what in ("dropped", "overflow")]
    found = _summed(torch.tensor(sums, device=model.ranks.device), model.ranks, _stage_axes(model.plan))
    dropped, overflow = found.tolist()
    return dropped, overflow


def changed(
    state: State,
    batch: Batch,
    options: OptimizerOptions,
    decayed: Collection[str],
    before_update: Callable[[], None] = _no_wait,
) -> tuple[Gradients, torch.Tensor]:
    """Change the state in place; return the gradients and their norm. ``decayed``: weights by name. No value is read to the host.

    ``before_update`` is called when gradients and norm are computed, and nothing of the state has changed.
    """
    model = state.model
    for stage in model.stages.values():
        stage.moment = replace(stage.moment, step=state.step)
    gradients = gradients_of(model, batch)
    elsewhere = counted_elsewhere(model)
    sharded_by = {one.key: one.in_update.axes for one in model.weights}
    norm = global_norm(
        {key: gradient for key, gradient in gradients.by_key.items() if key not in elsewhere},
        sharded_by,
        model.plan.mesh,
        model.ranks,
        _stage_axes(model.plan),
        model.by_all,
    )
    at_rest = {key for stage in model.stages.values() for key in stage.resting}
    weights = {key: local_of(one).detach() for key, one in model.parameters().items()}
    parts = {key: part for one in model.updated for key, part in one.own_parts(weights).items()}
    before_update()
    apply_gradients(
        {key: weight for key, weight in {**weights, **parts}.items() if key not in at_rest},
        gradients.by_key,
        state.kept,
        step=state.step,
        norm=norm,
        options=options,
        decayed={one.key for one in model.weights if one.weight in decayed},
        optimizer=model.plan.request.optimizer,
        shared=state.shared,
        average=model.plan.request.average,
        resting=torch_dtype(model.plan.request.weights_dtype),
    )
    to_codes = [one for stage in model.stages.values() for one in stage.updated_to_codes()]
    for one in model.updated:
        if one not in to_codes:
            gather_updates(one, weights)
    rest_as_codes(model, state)
    copy_tied(model)
    state.step += 1
    for number, stage in model.stages.items():
        for name, bias_ZE in stage.frozen.items():
            stack = stage.plan.by_name[name].stack
            assert stack is not None, name
            stage.frozen[name] = updated_bias(bias_ZE, gradients.counts[number][stack].by_expert, BIAS_RATE)
        update_delayed(stage, state.step)
    return gradients, norm


def update_delayed(stage: Stage, step: int) -> None:
    """Reduce the amaxes of a step, and go on to the factors after it. ``step``: its number, from 1."""
    recipe = stage.plan.request.precision
    if recipe is None or recipe.history is None:
        return
    kept = [(one, stage.delayed[one.name]) for one in stage.plan.delayed]
    reduce_amaxes(kept, stage.ranks.peers)
    for scale, one in kept:
        one.follow(scale.operand.quantizer, recipe.history, step)


def reduce_updates(one: Updated, gradients: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The gradients of a group whose update is sharded, after the last microbatch."""
    return one.reduced(gradients)


def gather_updates(one: Updated, weights: Mapping[str, torch.Tensor]) -> None:
    """Make the weights of such a group whole after their update."""
    one.gather(weights)


def _sum_late(stage: Stage) -> None:
    """Sum the gradients that are still partial over replicas, in one collective per set of axes and dtype."""
    parameters = stage.parameters()
    waiting: dict[tuple[tuple[str, ...], torch.dtype], list[torch.Tensor]] = {}
    for group in stage.groups:
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
        dist.all_reduce(flat, group=stage.ranks.peers(axes).group)
        summed = flat.split([gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, summed, strict=True):
            gradient.copy_(total.view_as(gradient))


def _summed(array: torch.Tensor, ranks: Ranks, axes: tuple[str, ...]) -> torch.Tensor:
    peers = ranks.peers(ranks.mesh.in_mesh_order(axes))
    if peers.group is not None:
        array = array.clone()
        dist.all_reduce(array, group=peers.group)
    return array
