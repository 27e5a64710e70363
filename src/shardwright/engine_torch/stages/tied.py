"""Weights that two stages have: each of them computes a part of the gradient, and both take the same step with their sum."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwright.core.pipeline.tied import tied_stages
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.lowering.parameters import local_of
from shardwright.engine_torch.model.model import Model
from shardwright.engine_torch.model.stage import Stage
from shardwright.engine_torch.stages.transfers import Transfers


def sum_tied(model: Model) -> None:
    """Sum the gradients of weights that two stages have. Both add them in the same order, so that the sums have the same bits."""
    pipeline = model.plan.pipeline
    if pipeline is None:
        return
    transfers = Transfers(model.ranks.peers(pipeline.axes))
    for name, (first, last) in tied_stages(model.plan.stage_plans).items():
        own = [_gradient(model.stages[number], name) for number in (first, last) if number in model.stages]
        if not own:
            continue
        if len(own) == 2:
            parts = own
        else:
            is_first = first in model.stages
            other = model.table.rank_of(last if is_first else first)
            if other == model.rank:
                # A dry run has one stage of the rank alone.
                continue
            row = model.stages[first if is_first else last].plan.by_name[name]
            with moving(row.component, name):
                transfers.send(own[0], other)
            arrived = transfers.receive(torch.empty_like(own[0]), other).wait()
            parts = [own[0], arrived] if is_first else [arrived, own[0]]
        total = parts[0] + parts[1]
        transfers.finish()
        for gradient in own:
            gradient.copy_(total)


def copy_tied(model: Model) -> None:
    """Give a second stage of this rank the values of the first one, which alone is stored, read and changed."""
    for name, (first, last) in tied_stages(model.plan.stage_plans).items():
        if first in model.stages and last in model.stages:
            with torch.no_grad():
                [to], [source] = (list(_parameters(model.stages[number], name)) for number in (last, first))
                local_of(to).copy_(local_of(source))


def counted_elsewhere(model: Model) -> frozenset[str]:
    """The keys of weights that another rank counts in sums over all weights: of two stages that have one the first does."""
    return frozenset(
        name
        for name, (first, last) in tied_stages(model.plan.stage_plans).items()
        if last in model.stages and first not in model.stages
    )


def _gradient(stage: Stage, name: str) -> torch.Tensor:
    """A rank's shard of the gradient, as it is summed over microbatches."""
    [key] = [one.key for one in stage.weights if one.weight == name]
    if (scattered := next((one for one in stage.updated if one.in_microbatches and key in one.keys), None)) is not None:
        return scattered.held(key)
    parameter = stage.parameters()[key]
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_of(parameter.grad)


def _parameters(stage: Stage, name: str) -> Iterator[torch.Tensor]:
    parameters = stage.parameters()
    return (parameters[one.key] for one in stage.weights if one.weight == name)
