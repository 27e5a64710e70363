"""What a layout quantizes is what one device makes of the same elements, wherever the plan says that it is free of the layout; and
losses differ no more than those of other orders of summation.

``make test`` runs a covering part; ``python -m tests.sameness.recipes`` all of it, as part of `make test-all`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from shardwright.core.planning import make_plan
from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.presets import preset
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.precision.operands import quantized
from tests.engine_torch.ranks import Ranks
from tests.matrix import some
from tests.precision.made import ordinary
from tests.sameness.codes import moved
from tests.sameness.recipe_bounds import bounded, share
from tests.sameness.recipe_cases import LLAMA3, MIXTRAL, RecipeCase, case, every_case, plan_of
from tests.sameness.recipes import free_of, most_moved, recorded, run_of

CASES = [case("fp8-current", LLAMA3, "renamed", north=2, east=1, up=2), *every_case()]
ON_TORCH = {CASES[0], case("mxfp8", MIXTRAL, "ep-as-cp", fsdp=2, expert=2)}
ON_JAX = {case("fp8-current", LLAMA3, "fsdp-tp", fsdp=2, tensor=2)}
"""Those of `make test`: one where everything is free by reductions, with replicas and other names, and one where much is not."""


def numbers(of: set[RecipeCase]) -> list[int]:
    return [CASES.index(one) for one in of]


def assert_moves_what_is_not_free(engine: str, one: RecipeCase, ranks: Ranks) -> None:
    plan = plan_of(one, "jax" if engine == "jax" else "torch")
    free, by = free_of(plan), most_moved(engine, one, ranks)
    assert by.keys() == free.keys()
    assert {place: share for place, share in by.items() if free[place] and share} == {}
    # Under `ep` the tokens of an expert come in their order, by chance. Devices have entire blocks of 16 of these tokens: of `nvfp4` only
    # the random numbers are moved, and what was drawn is what is rounded by here.
    by_chance = one.layout == "ep" or one.recipe == "nvfp4"
    assert any(by.values()) or all(free.values()) or by_chance, "what is not free was not moved"
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
def test_losses_differ_no_more_than_those_of_other_orders(engine: str, eight: Ranks) -> None:
    one = case("fp8-current", LLAMA3, "fsdp-tp", fsdp=2, tensor=2)
    found = share(run_of(engine, one, eight, FEW_STEPS), *bounded(one.alone, FEW_STEPS, FEW_ORDERS))
    assert found.of_loss <= 1, found
    assert found.of_gradient <= 1, found


def shards_of(x: np.ndarray, name: str, dims: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The bits of a rank's codes and scales of its shard along one dim after the other, where all ranks agree on the amax."""
    quantizer = preset(name).quantizers["output", "weight"]
    size, number = dist.get_world_size(), dist.get_rank()
    order = tuple(range(size))
    peers = Peers(axes=("all",), size=size, index=number, group=dist.group.WORLD, order=order)
    shard = torch.from_numpy(x)
    for dim in dims:
        shard = shard.chunk(size, dim)[number]
    found: Quantized = quantized(shard, quantizer, peers)
    return found.codes.view(torch.uint8).numpy(), found.scales.numpy()


@pytest.mark.parametrize(("name", "dim"), [("fp8-current", 0), ("fp8-current", 1), ("fp8-row", 1)])
def test_shards_whose_ranks_agree_have_the_bytes_of_the_tensor(name: str, dim: int, four: Ranks) -> None:
    x = ordinary(7)
    whole = quantized(torch.from_numpy(x), preset(name).quantizers["output", "weight"])
    shards = four.run(shards_of, x, name, (dim,))
    codes = np.concatenate([codes for codes, _ in shards], axis=dim)
    np.testing.assert_array_equal(codes, whole.codes.view(torch.uint8).numpy())
    for _, scales in shards:
        np.testing.assert_array_equal(scales, whole.scales.numpy())
