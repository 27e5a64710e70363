"""A few role tables that nobody wrote, on four ranks; ``random_layouts`` tries as many as one likes."""

from __future__ import annotations

import pytest

from tests.engine_torch.random_layouts import Alone, assert_trains_as_alone, torch_layout
from tests.engine_torch.ranks import Ranks

SEEDS = range(60)
ON_FOUR = [seed for seed in SEEDS if (found := torch_layout(seed)) and found[0].mesh.num_devices == 4]


@pytest.fixture(scope="module")
def alone(one: Ranks) -> Alone:
    return Alone(one)


@pytest.mark.parametrize("seed", ON_FOUR)
def test_trains_as_one_device(seed: int, four: Ranks, alone: Alone) -> None:
    found = torch_layout(seed)
    assert found is not None
    assert_trains_as_alone({4: four}, alone, *found)
