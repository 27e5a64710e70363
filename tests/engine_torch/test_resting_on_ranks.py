"""Modules whose weights rest as codes, on ranks: beside one process, what they gather, and what a mesh cannot have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.engine_torch.own_resting import not_followed, refusals_on_ranks, scales_of_experts, trained_bytes
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.resting_cases import RestingCase, checked, planned_bytes

COVERING = {RestingCase("fp8-current", "tp"): ("one",)}
"""And the meshes that load what was saved. ``python -m tests.engine_torch.resting_modules`` has all of them."""


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_codes_on_a_mesh_are_those_of_one_process_and_of_high_precision(
    eight: Ranks, case: RestingCase, tmp_path: Path
) -> None:
    result = checked(case, eight, tmp_path, 2, COVERING[case])
    assert result.loads == 2 * len(COVERING[case])


REFUSED_ON_RANKS: Mapping[str, str] = {
    "blocks": "Linear: 'weight' (64, 128): 4 ranks shard dim 0, which is 64, and 'mxfp8' has blocks of 32 along it, which no shard may "
    "divide where weights rest as codes. Take 128, fewer ranks, or leave out primary_weights.",
    "weight_mesh": "Linear: 'weight': weight_mesh has the ranks [0, 1, 2, 3], and those that shard it are [0, 1]: FSDP and tp as one "
    "dim, without replicas. Give these, or leave weight_mesh out: they follow from the placement.",
    "dim 1": "Linear: 'weight': fully_shard shards dim 1 of it, by a shard_placement_fn, and codes are gathered along dim 0. Shard dim 0, "
    "or leave out primary_weights.",
    "replicas": "resting.weight_codes",
    "tied": "Linear: 'weight' rests as codes, and only its module may read it",
}


def test_what_a_mesh_cannot_have_is_refused_on_every_rank(eight: Ranks, tmp_path: Path) -> None:
    for rank, refused in enumerate(eight.first(4).run(refusals_on_ranks, str(tmp_path))):
        assert refused.keys() == REFUSED_ON_RANKS.keys()
        for name, text in REFUSED_ON_RANKS.items():
            assert text in refused[name].replace("[2, 3]: FSDP", "[0, 1]: FSDP"), (rank, name, refused[name])


def test_experts_of_other_ranks_have_scales_of_their_own(eight: Ranks) -> None:
    first, second = ([largest / 448, 2 * largest / 448] for largest in (1.0, 2.0))
    assert eight.first(4).run(scales_of_experts) == [
        pytest.approx(largest) for largest in (first, first, second, second)
    ]


@pytest.mark.parametrize("recipe", ["fp8-block", "mxfp8"])
def test_what_is_gathered_is_what_the_plan_says(eight: Ranks, recipe: str) -> None:
    planned = planned_bytes(recipe, 512, 1792, 256, 2)
    for gathers, at_rest in eight.first(2).run(trained_bytes, recipe, 512, 1792, 256):
        assert gathers == [planned.gathered] * 2
        assert at_rest == planned.at_rest
    elements = 2 * 512 * 512 + 2 * 256 * 512 + 3 * 1792 * 512
    if recipe == "fp8-block":
        assert planned.gathered <= 1.02 * elements


def test_codes_of_a_shard_follow_what_is_written_through_a_view(eight: Ranks) -> None:
    assert eight.first(2).run(not_followed) == [[], []]
