"""Random layouts compared with one device; ``random_whole`` trains 1,000 others of both engines each time."""

from __future__ import annotations

import pytest

from shardwright.core.resolution.token_hops import in_two_hops
from tests.matrix import some
from tests.sameness.page import PAGE, section_of, with_section
from tests.sameness.random_layouts import DTYPES, draw
from tests.sameness.random_page import TITLES
from tests.sameness.random_runs import AgainstOneDevice, on_jax

SEED = 20261122
ON_JAX, ON_TORCH = (0, 2, 8, 10, 12, 16, 18, 20, 22, 42, 44, 46), range(1, 48, 2)
"""Thirty-six of every kind. ``make test`` compiles four of those on JAX, and ``make test-all`` trains 1,000 others."""
MOST = {"jax": 8, "torch": 8}


@pytest.fixture(scope="module")
def against() -> AgainstOneDevice:
    return AgainstOneDevice(jax=on_jax)


@pytest.mark.parametrize("number", some(ON_JAX, (2, 6, 8, 10)))
def test_training_is_the_same_as_on_one_device(number: int, against: AgainstOneDevice) -> None:
    drawn = draw(SEED, number, most=MOST)
    print(drawn.text)
    against.assert_same(drawn)


def test_they_are_of_every_kind() -> None:
    """They cover both engines, every movement, rules, options and orders of axes."""
    every = [draw(SEED, number, most=MOST) for number in (*ON_JAX, *ON_TORCH)]
    layouts = [one.plan.request.layout for one in every]
    for engine in MOST:
        own = [one for one in every if one.engine == engine]
        assert {one.family for one in own} == {"llama3", "mixtral", "deepseek3"}
        moves = {one.plan.request.layout.move_attention for one in own if one.plan.cp}
        assert moves == {"gather", "ring", "ulysses"}
        assert sum(one.in_another_order for one in own) >= 5
    assert {layout.move_moe for layout in layouts} == {"all-to-all", "two-hops", "ring", "weights"}
    assert {one.engine for one in every if in_two_hops(one.plan.request, one.plan.mesh)} == {*MOST}
    assert {len(one.plan.mesh.larger_than_one(one.plan.mesh.names)) for one in every} >= {2, 3}
    assert any(layout.rules for layout in layouts)
    entries = [entry for layout in layouts for entry in layout.entries.values()]
    assert any(entry.sequence_parallel for entry in entries)
    assert any(entry.weights == "whole" for entry in entries)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_page_has_a_thousand(dtype: str) -> None:
    found = section_of(PAGE.read_text(encoding="utf-8"), TITLES[dtype])
    assert found is not None
    assert found.startswith("1,000 layouts of seed ")


def test_a_section_replaces_only_itself() -> None:
    page = "# Page\n\n## A\n\none\n\n## B\n\ntwo\n"
    assert with_section(page, "A", "new") == "# Page\n\n## A\n\nnew\n\n## B\n\ntwo\n"
    assert with_section(page, "C", "new") == "# Page\n\n## A\n\none\n\n## B\n\ntwo\n\n## C\n\nnew\n"
    assert section_of(page, "B") == "two"
    assert section_of(page, "C") is None
