"""The actions of a rank in a step, one after the other: its part of the timetable that the core has proven.

B rows, L tokens, M embed. All are sizes on one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from shardwright.core.policies.policy import INPUT
from shardwright.core.schedules.actions import Action
from shardwright.engine_torch.experts.experts import MoeCounts
from shardwright.engine_torch.io.private import end_backward, forget_forward_order
from shardwright.engine_torch.io.scopes import moving
from shardwright.engine_torch.lowering.gathering import Gathered
from shardwright.engine_torch.model.model import SHARED, Model
from shardwright.engine_torch.model.stage import Batch, Stage
from shardwright.engine_torch.stages.passes import Pass, forward, scattered
from shardwright.engine_torch.stages.transfers import Arriving, Transfers

Place = tuple[int, int]
"""A stage and a microbatch."""


class Carried(NamedTuple):
    """``loss``: summed over the rank's valid tokens, 0 without the last stage. ``counts``: by stage and stack those of its experts, each
    layer's, summed over the microbatches."""

    loss: torch.Tensor
    counts: Mapping[int, Mapping[str, MoeCounts]]


def carry_out(model: Model, batch: Batch) -> Carried:
    """The passes of a step. Gradients are in the parameters, summed over what ``fully_shard`` sums them.

    Microbatch i has every ``num``-th of the rank's rows, from row i. ``batch``: a rank's local shard, BL.
    """
    step = _Step(model, batch)
    for stage in model.stages.values():
        begin(stage)
    for action in model.actions:
        with model.watching(action):
            step.do(action)
    return step.end()


def begin(stage: Stage) -> None:
    """Say which weights stay gathered in the step, and whether gradients wait for its end."""
    gathering = stage.gathering
    ends = set(stage.ends())
    for module in stage.sharded():
        once = gathering.ends_once if module in ends else gathering.once
        module.set_reshard_after_backward(not once, recurse=False)
        module.set_requires_gradient_sync(not gathering.once, recurse=False)


def sum_replicas(stage: Stage, *, last: bool) -> None:
    """Whether the next backward pass sums gradients over replicas: the last one of the stage in a step does."""
    for module in stage.sharded():
        module.set_requires_all_reduce(last, recurse=False)


class _Step:
    """``inputs``, ``cotangents``: what has come for a stage and a microbatch; ``passes``: those that are live; ``sent``: what a send
    takes; ``embedded``: by microbatch, the output of an embedding that all stages share; ``ended``: how often each shared end had a backward
    pass."""

    def __init__(self, model: Model, batch: Batch) -> None:
        self._model, self._batch = model, batch
        self._loss = torch.zeros((), device=model.ranks.device)
        self._counts: dict[int, dict[str, list[MoeCounts]]] = {}
        self._done: Counter[int] = Counter()
        self._passes: dict[Place, Pass] = {}
        self._inputs: dict[Place, Arriving] = {}
        self._cotangents: dict[Place, Arriving] = {}
        self._sent: dict[Action, torch.Tensor] = {}
        self._embedded: dict[int, torch.Tensor] = {}
        self._ended: Counter[str] = Counter()
        pipeline = model.plan.pipeline
        self._transfers = Transfers(model.ranks.peers(pipeline.axes if pipeline else ()))

    def do(self, action: Action) -> None:
        number, kind, microbatch = action
        if kind == "reduce":
            self._reduce(self._model.stages[number])
            return
        assert microbatch is not None
        place = (number, microbatch)
        match kind:
            case "forward":
                self._forward(place)
            case "backward" | "input_gradient":
                self._backward(place, whole=kind == "backward")
            case "weight_gradient":
                self._passes.pop(place).weight_gradient()
            case "send":
                self._send(action, number + 1)
            case "send_gradient":
                self._send_back(action, number - 1)
            case "receive":
                self._inputs[place] = self._arriving(number, number - 1)
            case "receive_gradient":
                self._cotangents[place] = self._arriving(number, number + 1)
            case "embed":
                self._embed(microbatch)
            case "embed_gradient":
                self._embed_gradient(microbatch)
            case "logits":
                self._logits(microbatch)

    def end(self) -> Carried:
        self._transfers.finish()
        left = (self._passes, self._inputs, self._cotangents, self._sent, self._embedded)
        assert not any(left), [list(one) for one in left]
        counts = {
            number: {
                stack: MoeCounts(*(torch.stack(each).sum(dim=0) for each in zip(*microbatches, strict=True)))
                for stack, microbatches in by_stack.items()
            }
            for number, by_stack in self._counts.items()
        }
        return Carried(self._loss, counts)

    def _forward(self, place: Place) -> None:
        number, microbatch = place
        stage = self._stage_at(place)
        forget_forward_order(stage.sharded())
        made = forward(
            stage, self._rows(microbatch), None if stage.has_embedding else self._arrived(self._inputs, place)
        )
        self._passes[place] = made
        if made.is_loss:
            self._loss += made.output.detach()
        else:
            last = number == self._model.table.num_stages - 1
            to = SHARED if last else number + 1
            self._pass_on(to, microbatch, made.output, self._inputs, Action(number, "send", microbatch))
        for stack, layers in made.counts.items():
            fields = zip(*layers, strict=True)
            of_stage = self._counts.setdefault(number, {})
            of_stage.setdefault(stack, []).append(MoeCounts(*(torch.stack(list(each)) for each in fields)))

    def _backward(self, place: Place, *, whole: bool) -> None:
        number, microbatch = place
        # Layers that are computed again draw the same random numbers.
        stage = self._stage_at(place)
        cotangent = None if stage.has_logits else self._arrived(self._cotangents, place)
        if whole:
            self._done[number] += 1
            last = self._done[number] == self._model.table.microbatches
            if last:
                _let_go(stage)
            # After it: whether gradients are reduced also says whether replicas are.
            sum_replicas(stage, last=last)
            found = self._passes.pop(place).backward(cotangent)
        else:
            found = self._passes[place].input_gradient(cotangent)
        if found is not None:
            to = number - 1 if number else SHARED
            self._pass_on(to, microbatch, found, self._cotangents, Action(number, "send_gradient", microbatch))

    def _stage_at(self, place: Place) -> Stage:
        """A stage, whose products are now of a microbatch."""
        number, microbatch = place
        stage = self._model.stages[number]
        stage.moment = replace(stage.moment, microbatch=microbatch)
        return stage

    def _pass_on(
        self, to: int, microbatch: int, tensor: torch.Tensor, here: dict[Place, Arriving], send: Action
    ) -> None:
        """To another stage of this rank at once; what another rank gets waits for its send."""
        if to in self._model.stages:
            here[to, microbatch] = Arriving(tensor.detach(), None)
        elif to != SHARED:
            self._sent[send] = tensor

    def _send(self, action: Action, to: int) -> None:
        with moving("residual", INPUT):
            self._transfers.send(self._sent.pop(action), self._model.table.rank_of(to))

    def _send_back(self, action: Action, to: int) -> None:
        """A name of its own, by which a dry run knows the pass."""
        self._send(action, to)

    def _arriving(self, number: int, source: int) -> Arriving:
        empty = self._model.stages[number].empty_residual()
        return self._transfers.receive(empty, self._model.table.rank_of(source))

    def _arrived(self, here: dict[Place, Arriving], place: Place) -> torch.Tensor:
        """What has come for a stage. Of what a shared end needs, the ranks that do not have its stage have zeros."""
        arriving = here.pop(place, None)
        if arriving is not None:
            return arriving.wait()
        assert place[0] == SHARED or self._without_ends, place
        return self._model.stages[place[0]].empty_residual().zero_()

    @property
    def _without_ends(self) -> bool:
        """A dry run has the stages of a rank without the ends that all share."""
        return self._model.plan.ends_plan is not None and SHARED not in self._model.stages

    def _rows(self, microbatch: int) -> Batch:
        return {name: array[microbatch :: self._model.table.microbatches] for name, array in self._batch.items()}

    def _embed(self, microbatch: int) -> None:
        """The output of a shared embedding on all ranks, of which the first stage is given it."""
        ends = self._stage_at((SHARED, microbatch))
        forget_forward_order(ends.sharded())
        output = ends.part(self._rows(microbatch), None, "embedding").output
        self._embedded[microbatch] = output
        if 0 in self._model.stages:
            self._inputs[0, microbatch] = Arriving(output.detach(), None)

    def _embed_gradient(self, microbatch: int) -> None:
        """Its backward pass, from the cotangent of the first stage's input."""
        output = self._embedded.pop(microbatch)
        cotangent = self._arrived(self._cotangents, (SHARED, microbatch))
        with moving("residual", INPUT):
            self._transfers.sum_gradient(cotangent)
        self._of_shared(output, cotangent, "embedding")

    def _logits(self, microbatch: int) -> None:
        """The loss of the last stage's output, its backward pass, and the cotangent of that output."""
        ends = self._stage_at((SHARED, microbatch))
        # The last stage's own tensor stays as it is.
        x_BLM = self._arrived(self._inputs, (SHARED, microbatch)).clone()
        with moving("residual", INPUT):
            self._transfers.sum_output(x_BLM)
        forget_forward_order(ends.sharded())
        leaf_BLM = x_BLM.requires_grad_()
        loss = ends.part(self._rows(microbatch), leaf_BLM, "logits").output
        self._loss += loss.detach()
        self._of_shared(loss, None, "logits")
        last = self._model.table.num_stages - 1
        if last in self._model.stages:
            assert leaf_BLM.grad is not None
            self._cotangents[last, microbatch] = Arriving(leaf_BLM.grad, None)

    def _of_shared(self, output: torch.Tensor, cotangent: torch.Tensor | None, end: str) -> None:
        """A backward pass of a shared end. Weights of both stay gathered until the last one. Replicas are summed in the last one of each, those
        of a tied weight in the last one of both."""
        ends, num = self._model.stages[SHARED], self._model.table.microbatches
        self._ended[end] += 1
        last = self._ended.total() == num * (ends.has_embedding + ends.has_logits)
        if last:
            _let_go(ends)
        sum_replicas(ends, last=self._ended[end] == num)
        tied = {one.key for one in ends.weights if one.num_uses > 1}
        for module in ends.sharded():
            if isinstance(module, Gathered) and tied & module.own().keys():
                module.set_requires_all_reduce(last, recurse=False)
        with scattered(ends):
            output.backward(cotangent)

    def _reduce(self, stage: Stage) -> None:
        """The reduction of what waited for the end. Without a split backward the last pass has done it."""
        if stage.gathering.split:
            _let_go(stage)
            sum_replicas(stage, last=True)
            end_backward(stage.sharded())


def _let_go(stage: Stage) -> None:
    """Free gathered weights and reduce gradients after the next backward pass, or half of one: the stage's last."""
    for module in stage.sharded():
        module.set_reshard_after_backward(True, recurse=False)
        module.set_requires_gradient_sync(True, recurse=False)
