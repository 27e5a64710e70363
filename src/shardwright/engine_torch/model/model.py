"""What a rank has of a model: its stages, each a model of its own."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from shardwright.core.plan.fsdp_groups import FsdpGroup, WeightOfLayer
from shardwright.core.plan.plan import Plan
from shardwright.core.plan.saved_boxes import place_in_stage
from shardwright.core.recipes.kernels import Device
from shardwright.core.schedules.actions import Action
from shardwright.core.stages.choice import timetable
from shardwright.core.stages.gathering import OF_SHARED_ENDS, gathering_of
from shardwright.engine_torch.io.layer_io import HowMany, as_counted
from shardwright.engine_torch.io.mesh import Ranks
from shardwright.engine_torch.io.recomputation import remembered
from shardwright.engine_torch.lowering.links import links_of
from shardwright.engine_torch.lowering.updates import Updated
from shardwright.engine_torch.model.stage import Batch, Result, Stage

Watching = Callable[[Action], AbstractContextManager[None]]

SHARED = -1
"""The number, among the stages of a rank, of the ends that all stages share."""


class Model:
    """The stages of a rank, by their numbers, and the timetable of its step.

    Without a pipeline there is one stage, number 0. The ends that all stages share are a stage of their own, on all ranks together. ``weights_on``: the device on which weights are allocated, if not the rank's.
    ``how_many``: see ``HowMany``. ``watching``: what each action is done in, as a dry run says. ``only``: some of the stages. ``products_on``: what multiplies codes, if not the rank's device. ``rank``: in the pipeline. ``table``: that of the step.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        weights_on: torch.device | None = None,
        how_many: HowMany = as_counted,
        only: Collection[int] | None = None,
        products_on: Device | None = None,
    ) -> None:
        self.plan, self.ranks = plan, ranks
        pipeline, num = plan.pipeline, plan.request.microbatches
        inside = ranks
        if pipeline is None:
            self.rank, self.table = 0, timetable("1f1b", 1, 1, num)
            plans, gathering = {0: plan}, gathering_of(None, plan.request.remat)
        else:
            choice, shared = pipeline.choice, pipeline.shared
            self.rank = place_in_stage(pipeline, plan.mesh, ranks.rank)[0]
            self.table = timetable(
                choice.schedule, choice.ranks, choice.virtual, num, "" if shared is None else shared.letters
            )
            numbers = [stage.number for stage in pipeline.of_rank(self.rank) if only is None or stage.number in only]
            plans = {number: plan.stage_plans[number] for number in numbers}
            inside = ranks.beside(pipeline.axes)
            gathering = gathering_of(pipeline.choice.schedule, plan.request.remat)
        self.watching: Watching = lambda _: nullcontext()
        self.stages: dict[int, Stage] = {}
        for number, own in plans.items():
            # No stage waits for a cotangent of the first one.
            begins = pipeline is not None and pipeline.choice.stages[number].embedding
            links = links_of(own, inside, num, split=gathering.split and not begins, products_on=products_on)
            links = replace(links, experts=replace(links.experts, how_many=_read_once(how_many)))
            self.stages[number] = Stage(own, links, inside, weights_on, gathering)
        if plan.ends_plan is not None and (only is None or SHARED in only):
            links = links_of(plan.ends_plan, ranks, num, split=False, products_on=products_on)
            self.stages[SHARED] = Stage(plan.ends_plan, links, ranks, weights_on, OF_SHARED_ENDS)

    @property
    def actions(self) -> tuple[Action, ...]:
        return tuple(self.table.actions[self.rank])

    @property
    def only(self) -> Stage:
        """The one stage of a model without a pipeline."""
        [stage] = self.stages.values()
        return stage

    def __call__(self, batch: Batch) -> Result:
        """``batch``: the rank's local shard of the input's fields, BL. Without a pipeline."""
        return self.only(batch)

    @property
    def shares_logits(self) -> bool:
        """Whether all stages make the loss together: each has that of its targets."""
        return SHARED in self.stages and self.stages[SHARED].has_logits

    @property
    def by_all(self) -> frozenset[str]:
        """The keys of the weights of ends that all stages share."""
        return frozenset(one.key for one in self.stages[SHARED].weights) if SHARED in self.stages else frozenset()

    @property
    def weights(self) -> tuple[WeightOfLayer, ...]:
        """The weights of all stages. A weight that two stages of the rank have is that of the first of them."""
        found: dict[str, WeightOfLayer] = {}
        for stage in self.stages.values():
            for one in stage.weights:
                found.setdefault(one.key, one)
        return tuple(found.values())

    @property
    def groups(self) -> list[FsdpGroup]:
        return [group for stage in self.stages.values() for group in stage.groups]

    @property
    def updated(self) -> list[Updated]:
        return [one for stage in self.stages.values() for one in stage.updated]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Every weight as this rank stores it, by its key. Do not cache the result: the first step replaces the tensors."""
        found: dict[str, torch.Tensor] = {}
        for stage in self.stages.values():
            for key, parameter in stage.parameters().items():
                found.setdefault(key, parameter)
        return found

    def to_empty(self, device: torch.device) -> None:
        """Allocate the weights on a device."""
        for stage in self.stages.values():
            stage.to_empty(device)


def _read_once(how_many: HowMany) -> HowMany:
    """Counts that a layer reads from the device in its first run alone."""
    return lambda counts, total: remembered(lambda: how_many(counts, total))
