"""A few role tables that nobody wrote, beside one device; ``random_layouts`` tries as many as one likes."""

from __future__ import annotations

import pytest

from tests.sameness.random_layouts import assert_same, random_plan

SEEDS = (1, 5, 9, 12)


@pytest.mark.parametrize("seed", SEEDS)
def test_trains_as_one_device(seed: int) -> None:
    found = random_plan(seed)
    assert found is not None
    assert_same(*found)
