"""What a layout quantizes is what one device makes of the same elements, wherever the plan says that it is free of the layout.

``make test`` runs a covering part; ``python -m tests.sameness.recipes`` all of it, with losses, as part of `make test-all`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from shardwright.core.planning import make_plan
from tests.engine_torch.meeting import in_group
from tests.engine_torch.ranks import Ranks
from tests.matrix import some
from tests.sameness.codes import moved
from tests.sameness.recipe_bounds import bounded, share
from tests.sameness.recipe_cases import LLAMA3, MIXTRAL, RecipeCase, case, every_case, plan_of
from tests.sameness.recipes import free_of, most_moved, recorded, run_of

CASES = every_case()
ON_TORCH = {
    case("fp8-current", LLAMA3, "renamed", north=2, east=2, up=2),
    case("mxfp8", MIXTRAL, "ep-as-cp", fsdp=2, expert=2),
}
ON_JAX = {case("fp8-current", LLAMA3, "fsdp-tp", fsdp=2, tensor=2)}
"""Those of `make test`: one where everything is free by reductions, with replicas and other names, and one where much is not."""


@pytest.fixture(scope="module")
def eight() -> Iterator[Ranks]:
    ranks = Ranks(8, in_group)
    yield ranks
    ranks.end()


def numbers(of: set[RecipeCase]) -> list[int]:
    return [CASES.index(one) for one in of]


def assert_moves_what_is_not_free(engine: str, one: RecipeCase, ranks: Ranks) -> None:
    plan = plan_of(one, "jax" if engine == "jax" else "torch")
    free, by = free_of(plan), most_moved(engine, one, ranks)
    assert by.keys() == free.keys()
    assert {place: share for place, share in by.items() if free[place] and share} == {}
    assert any(by.values()) or all(free.values()) or one.layout == "ep", "what is not free was not moved"
    assert ("SW404" in {finding.code for finding in plan.findings}) != all(free.values())


@pytest.mark.parametrize("one", some(CASES, numbers(ON_TORCH)), ids=str)
def test_ranks_quantize_as_one_device(one: RecipeCase, eight: Ranks) -> None:
    assert_moves_what_is_not_free("torch", one, eight)


@pytest.mark.parametrize("one", some(CASES, numbers(ON_JAX)), ids=str)
def test_devices_of_jax_quantize_as_one_device(one: RecipeCase, eight: Ranks) -> None:
    assert_moves_what_is_not_free("jax", one, eight)


def test_without_the_reduction_of_amaxes_the_same_comparison_finds_what_moves(eight: Ranks) -> None:
    """Otherwise the cases above would test nothing."""
    plan = plan_of(case("fp8-current", LLAMA3, "fsdp-tp", fsdp=2, tensor=2), "torch")
    recipe = plan.request.precision
    assert recipe is not None
    alone = make_plan(replace(plan.request, precision=replace(recipe, reduce_amax=False)))
    (step,) = recorded("torch", alone, eight, steps=1)
    by = moved(alone, step)
    not_free = {place for place, free in free_of(alone).items() if not free}
    found = {place for place, share in by.items() if share}
    # By chance both halves of the batch have the same largest input.
    assert found <= not_free
    assert len(found) > len(by) / 2


FEW_STEPS, FEW_ORDERS = 3, 3


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_losses_differ_by_no_more_than_those_of_other_orders(engine: str, eight: Ranks) -> None:
    one = case("fp8-current", LLAMA3, "fsdp-tp", 1, fsdp=2, tensor=2)
    found = share(run_of(engine, one, eight, FEW_STEPS), *bounded(one.alone, FEW_STEPS, FEW_ORDERS))
    assert found.of_loss <= 1, found
    assert found.of_gradient <= 1, found
