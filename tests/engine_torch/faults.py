"""Faults put into the engine on purpose, by name, each for one run on a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.plan import Plan
from shardwright.engine_torch.io.mesh import Peers, Ranks
from shardwright.engine_torch.model import interpreter, stage
from shardwright.engine_torch.stages import timetable
from shardwright.engine_torch.training import step
from shardwright.training.optimizer import OptimizerOptions
from tests.engine_torch.redistributing import wrong_after_steps
from tests.engine_torch.training import RankRun, train


def _change_loss(patch: pytest.MonkeyPatch, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Have the loss of each rank be ``change(loss, valid_BL)``."""
    right = interpreter.summed_cross_entropy

    def wrong(logits_BLV: torch.Tensor, targets_BL: torch.Tensor, valid_BL: torch.Tensor, vocab: Peers) -> torch.Tensor:
        return change(right(logits_BLV, targets_BL, valid_BL, vocab), valid_BL)

    patch.setattr(interpreter, "summed_cross_entropy", wrong)


def replicas_not_summed(patch: pytest.MonkeyPatch) -> None:
    def never(of: stage.Stage, *, last: bool) -> None:
        del last
        for module in of.sharded():
            module.set_requires_all_reduce(False, recurse=False)

    patch.setattr(timetable, "sum_replicas", never)


def late_sums_made_twice(patch: pytest.MonkeyPatch) -> None:
    """Gradients that are already summed are summed again."""

    def twice(of: stage.Stage) -> None:
        _sum_late(of)
        _sum_late(of)

    _sum_late = step._sum_late
    patch.setattr(step, "_sum_late", twice)


def late_sums_left_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "_sum_late", lambda _: None)


def gradients_averaged(patch: pytest.MonkeyPatch) -> None:
    """As ``fully_shard`` does by default, where gloo supports it."""

    def scaled(loss: torch.Tensor, valid_BL: torch.Tensor) -> torch.Tensor:
        del valid_BL
        return loss.detach() + (loss - loss.detach()) / dist.get_world_size()

    _change_loss(patch, scaled)


def microbatches_divided_twice(patch: pytest.MonkeyPatch) -> None:
    def halved(loss: torch.Tensor, valid_BL: torch.Tensor) -> torch.Tensor:
        del valid_BL
        return loss.detach() + (loss - loss.detach()) / 2

    _change_loss(patch, halved)


def loss_normalised_by_each_rank(patch: pytest.MonkeyPatch) -> None:
    """The mean of the ranks' means instead of the mean over all tokens."""

    def normalised(loss: torch.Tensor, valid_BL: torch.Tensor) -> torch.Tensor:
        own = valid_BL.sum()
        of_all = own.clone()
        dist.all_reduce(of_all)
        return loss * of_all / (own.clamp(min=1) * dist.get_world_size())

    _change_loss(patch, normalised)


def a_replica_dropped(patch: pytest.MonkeyPatch) -> None:
    def dropped(loss: torch.Tensor, valid_BL: torch.Tensor) -> torch.Tensor:
        del valid_BL
        return loss.detach() + (loss - loss.detach()) * (dist.get_rank() < 2)

    _change_loss(patch, dropped)


def axes_in_mesh_order(patch: pytest.MonkeyPatch) -> None:
    """Axes in mesh order, whatever their order on a dim."""
    right = Ranks._new_peers
    patch.setattr(Ranks, "_new_peers", lambda ranks, axes: right(ranks, ranks.mesh.in_mesh_order(axes)))


def shards_in_the_order_of_the_group(patch: pytest.MonkeyPatch) -> None:
    """An index in the order of the axes, and shards in the order of the group."""
    right = Ranks._new_peers

    def wrong(ranks: Ranks, axes: tuple[str, ...]) -> Peers:
        peers = right(ranks, axes)
        return replace(peers, order=tuple(range(peers.size)))

    patch.setattr(Ranks, "_new_peers", wrong)


def train_with(
    fault: str, plan: Plan, seed: int, options: OptimizerOptions, batches: Sequence[dict[str, np.ndarray]]
) -> RankRun:
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        return train(plan, seed, options, batches)


def wrong_after_steps_with(fault: str, mesh: Mesh, seeds: Sequence[int]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        globals()[fault](patch)
        return wrong_after_steps(mesh, seeds, torch.float32)


def weights_freed_between_halves(patch: pytest.MonkeyPatch) -> None:
    """As ``fully_shard`` does by default: weights are freed after the forward pass, and after each half of the backward pass."""
    right = timetable.begin

    def wrong(of: stage.Stage) -> None:
        right(of)
        for module in of.sharded():
            module.set_reshard_after_forward(True, recurse=False)
            module.set_reshard_after_backward(True, recurse=False)

    patch.setattr(timetable, "begin", wrong)


def loss_normalised_by_each_microbatch(patch: pytest.MonkeyPatch) -> None:
    """The mean of the microbatches' means instead of the mean over all tokens."""

    def normalised(loss: torch.Tensor, valid_BL: torch.Tensor) -> torch.Tensor:
        # Eight rows have 164 valid tokens in the first step, and four microbatches of two ranks.
        return loss / valid_BL.sum().clamp(min=1) * 164 / 8

    _change_loss(patch, normalised)


def tied_gradients_not_summed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "sum_tied", lambda _: None)


def norm_of_own_stages(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of its own stages."""
    right = step.global_norm
    patch.setattr(step, "global_norm", lambda *arguments: right(*arguments[:4]))


def a_tied_weight_counted_twice(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "counted_elsewhere", lambda _: frozenset())
