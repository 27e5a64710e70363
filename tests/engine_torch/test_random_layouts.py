"""Random layouts on ranks against one rank: those that ``tests/sameness/test_random_layouts.py`` does not test."""

from __future__ import annotations

import pytest

from tests.engine_torch.ranks import Ranks
from tests.matrix import some
from tests.sameness.random_layouts import draw
from tests.sameness.random_runs import AgainstOneDevice, on_ranks
from tests.sameness.test_random_layouts import MOST, ON_TORCH, SEED


@pytest.fixture(scope="module")
def against(eight: Ranks) -> AgainstOneDevice:
    return AgainstOneDevice(torch=on_ranks(eight))


@pytest.mark.parametrize("number", some(ON_TORCH, (2, 4, 6, 8, 12, 22)))
def test_trains_as_one_device(number: int, against: AgainstOneDevice) -> None:
    drawn = draw(SEED, number, most=MOST)
    print(drawn.text)
    against.assert_same(drawn)
