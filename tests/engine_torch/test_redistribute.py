"""The resharding of activations: each rank ends with its shard of the full array, for any order of axes."""

from __future__ import annotations

import pytest
import torch

from tests.engine_torch.ranks import Ranks
from tests.engine_torch.redistributing import (
    MESH,
    any_resharding,
    by_hand,
    each_collective,
    leaves_its_input_alone,
    wrong_after_steps,
)

SEEDS = range(1000)


def test_every_rank_ends_with_its_shard_of_the_sum(four: Ranks) -> None:
    assert four.run(wrong_after_steps, MESH, SEEDS, torch.float32) == [[]] * 4


def test_integers_are_resharded_in_the_same_way(four: Ranks) -> None:
    assert four.run(wrong_after_steps, MESH, SEEDS[:50], torch.int32) == [[]] * 4


def test_the_reshardings_have_every_kind_of_step_in_and_out_of_mesh_order() -> None:
    of_all = [step for seed in SEEDS for step in any_resharding(seed, MESH)[3]]
    kinds = {"all-reduce", "reduce-scatter", "all-gather", "all-to-all", "slice"}
    assert {step.kind for step in of_all} == kinds
    for axes in (("a", "b"), ("b", "a")):
        assert {step.kind for step in of_all if step.axes == axes} >= {"all-gather", "all-to-all", "slice"}, axes


@pytest.mark.parametrize(("axes", "order"), [(("a", "b"), [0, 1, 2, 3]), (("b", "a"), [0, 2, 1, 3])])
def test_each_collective_over_four_ranks(four: Ranks, axes: tuple[str, ...], order: list[int]) -> None:
    """``order``: the index of each rank's shard."""
    assert four.run(each_collective, MESH, axes) == [by_hand(index, 4) for index in order]


@pytest.mark.parametrize("axes", [("a",), ("b", "a")])
def test_collectives_do_not_change_their_input(four: Ranks, axes: tuple[str, ...]) -> None:
    assert four.run(leaves_its_input_alone, axes) == [True] * 4
