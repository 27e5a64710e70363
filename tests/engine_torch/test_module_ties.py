"""Modules whose ranks have seeds of their own, modules that share a weight in any order, and meshes of one rank."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwright.core.findings.errors import InputError
from shardwright.engine_torch.modules import Linear
from tests.engine_torch.own_ties import changed_since, initial, refused, tied
from tests.engine_torch.ranks import Ranks, one_answer


def test_values_are_those_of_the_first_ranks_seed(four: Ranks, one: Ranks) -> None:
    (needed,) = one.run(initial, 5, "cpu")
    assert one_answer(four.run(initial, 5, "meta")) == needed
    assert one_answer(four.first(2).run(initial, 5, "cpu")) == needed


def test_other_values_than_a_seeds_are_refused_where_seeds_differ(four: Ranks) -> None:
    assert four.run(changed_since) == [
        f"Linear: the ranks drew its values with other seeds, and 'bias' has changed on rank {rank} since. Call torch.manual_seed with one "
        "number on all ranks before the module is constructed, or change it after set_device_mesh."
        for rank in (1, 1, 2, 2)
    ]


def test_what_is_refused(four: Ranks) -> None:
    of_dtensor = (
        "it must be this rank's tensor, as parallel_mode and sequence_parallel have it. Give x.to_local(), and use DTensor.from_local of "
        "the output."
    )
    assert one_answer(four.run(refused)) == [
        f"Linear: its input is a DTensor (2, 8) of R; {of_dtensor}",
        f"Embedding: its input is a DTensor (4,) of S(0); {of_dtensor}",
        "Linear: 'weight' is shared with a module whose set_device_mesh has replaced it. Call set_device_mesh of this one too, before an "
        "optimizer is made.",
        "Embedding: tp 2 shards dim 0 of 'weight' (50257, 8), and does not divide 50257. Take 50256 or 50258, or other tp ranks. A "
        "vocabulary is filled up: take the larger number, also for a tied head, and give the loss the first 50257 logits.",
    ]


TIES = (
    (1, 1, True, "head"),
    (2, 2, False, "head"),
    (4, 2, True, "head"),
    (4, 2, True, "embedding"),
    (2, 1, False, "head"),
)


@pytest.fixture(scope="module")
def alone(one: Ranks) -> dict[tuple[bool, str], list[float]]:
    return {case: one.run(tied, 1, *case)[0] for case in ((True, "head"), (True, "embedding"), (False, "head"))}


@pytest.mark.parametrize(("num", "tp", "ours", "first"), TIES)
def test_tied_weights_have_values_in_any_order(
    four: Ranks, alone: dict[tuple[bool, str], list[float]], num: int, tp: int, ours: bool, first: str
) -> None:
    losses = one_answer(four.first(num).run(tied, tp, ours, first))
    np.testing.assert_allclose(losses, alone[ours, first], rtol=2e-3)


def test_layers_that_share_codes_have_them_in_any_order() -> None:
    for first, second in ((0, 1), (1, 0)):
        layers = [Linear(64, 64, bias=False, recipe="mxfp8", primary_weights="codes") for _ in range(2)]
        layers[1].weight = layers[0].weight
        for number in (first, second):
            layers[number].reset_parameters()
        x = torch.randn(4, 64)
        assert torch.equal(layers[0](x), layers[1](x))


def test_codes_of_another_recipe_are_refused() -> None:
    ours, other = (Linear(64, 64, recipe=recipe, primary_weights="codes") for recipe in ("mxfp8", "fp8-row"))
    other.weight = ours.weight
    ours.reset_parameters()
    with pytest.raises(
        InputError,
        match=r"'weight' is shared, and rests as codes of another recipe.*Give all modules that share a weight one recipe",
    ):
        other(torch.randn(4, 64))
