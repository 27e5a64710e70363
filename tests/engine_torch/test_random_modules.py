"""Modules under recipes with random bits: no mesh moves the bits, and a checkpoint has what the next pass draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Operand, Product, Recipe
from shardwright.engine_torch import load, save
from shardwright.engine_torch.modules import Linear
from tests.engine_torch.compiled_ranks import compiled as compiled_whole
from tests.engine_torch.own_random import (
    IN_ORDER,
    INPUTS,
    LAYERS,
    MIXED,
    OUTPUTS,
    Gradients,
    Layer,
    all_layers,
    alone,
    compiled,
    drawn,
    gradient,
    in_no_rows,
    made,
)
from tests.engine_torch.ranks import Ranks
from tests.engine_torch.refused_modules import refusal
from tests.matrix import rest

PLAIN = LAYERS[0]


def apart(found: Gradients, needed: Gradients) -> float:
    """The largest difference, relative to the norm."""
    assert found.keys() == needed.keys()
    return max(float(np.linalg.norm(found[name] - one) / np.linalg.norm(one)) for name, one in needed.items())


@pytest.mark.parametrize("ranks", [rest(IN_ORDER), MIXED], ids=["in order", "mixed"])
def test_ranks_draw_the_bits_of_one_process(four: Ranks, ranks: tuple[tuple[int, int], tuple[int, int]]) -> None:
    for of_rank in four.run(all_layers, ranks):
        for layer, found in zip(LAYERS, of_rank, strict=True):
            needed = alone(layer)
            assert apart(found, needed) < 1e-6, layer
            # Other bits are seen.
            assert apart(found, alone(layer, passes=2)) > 1e-2, layer


@pytest.mark.parametrize("length", [17, 32])
def test_ranks_draw_others_for_other_tokens_of_a_group(four: Ranks, length: int) -> None:
    """Also where the last group of a transform is filled up. Without a group no one says that these are other tokens."""
    assert four.first(2).run(in_no_rows, length, True) == [(False, False)] * 2
    assert four.first(2).run(in_no_rows, length, False) == [(True, True)] * 2


def test_a_compiled_module_asks_the_ranks_of_its_group(four: Ranks) -> None:
    assert four.first(2).run(compiled) == [True] * 2


def test_every_pass_draws_others_and_a_checkpoint_goes_on(tmp_path: Path) -> None:
    module, (x, cotangent) = made(PLAIN), drawn(PLAIN)
    found = []
    for number in range(4):
        if number == 2:
            save(tmp_path, module, step=2)
        module.zero_grad()
        with torch.no_grad():
            module(x)
        module(x).backward(cotangent)
        found.append(gradient(module, "weight").copy())
    assert module.random is not None
    assert int(module.random.passes) == 4
    assert all(not np.array_equal(one, other) for one, other in pairwise(found))
    torch.manual_seed(99)
    other = Linear(INPUTS, OUTPUTS, recipe="nvfp4", device="meta")
    other.reset_parameters()
    load(tmp_path, other)
    for needed in found[2:]:
        other.zero_grad()
        other(x).backward(cotangent)
        np.testing.assert_array_equal(gradient(other, "weight"), needed)
    other.reset_parameters()
    assert other.random is not None
    assert int(other.random.passes) == 0


def test_many_passes_have_the_mean_of_what_is_not_rounded() -> None:
    """Of the input's gradient under exact weights: rounding to the nearest would keep its error."""
    recipe = preset("nvfp4")
    place: tuple[Product, Operand] = ("input_gradient", "output_gradient")
    only = replace(recipe, quantizers={place: recipe.quantizers[place]})
    nearest = replace(only, quantizers={place: replace(only.quantizers[place], rounding="nearest")})
    layer = Layer(None, False, (16,))
    x, cotangent = drawn(layer)
    errors = {}
    for name, one, passes in (("nearest", nearest, 1), ("stochastic", only, 256)):
        torch.manual_seed(3)
        module = Linear(INPUTS, OUTPUTS, bias=False, recipe=one)
        total = torch.zeros_like(x)
        for _ in range(passes):
            leaf = x.clone().requires_grad_()
            module(leaf).backward(cotangent)
            assert leaf.grad is not None
            total += leaf.grad / passes
        needed = cotangent @ module.weight
        errors[name] = float((total - needed).detach().norm() / needed.detach().norm())
    assert errors["stochastic"] < errors["nearest"] / 4, errors


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of what it traces.
def test_a_compiled_module_draws_the_same() -> None:
    x, cotangent = drawn(PLAIN)
    plain, other = made(PLAIN), made(PLAIN)
    run_whole = compiled_whole(other)
    for _ in range(2):
        for one, run in ((plain, plain), (other, run_whole)):
            one.zero_grad()
            run(x).backward(cotangent)
        torch.testing.assert_close(gradient(other, "weight"), gradient(plain, "weight"), rtol=1e-6, atol=1e-6)
    assert other.random is not None
    assert int(other.random.passes) == 2


def changed(product: Product, operand: Operand, **others: object) -> Recipe:
    recipe = preset("nvfp4")
    place = (product, operand)
    return replace(recipe, quantizers={**recipe.quantizers, place: replace(recipe.quantizers[place], **others)})  # pyright: ignore[reportArgumentType]


def test_what_would_not_be_the_same_again_is_refused() -> None:
    assert refusal(lambda: Linear(16, 16, recipe=changed("output", "input", rounding="stochastic"))) == (
        "recipe 'nvfp4': it rounds stochastically (of input in output), which these modules do not compute. Use one of fp8-delayed, "
        "fp8-current, fp8-row, fp8-block, mxfp8, nvfp4, or change that."
    )
    assert refusal(lambda: Linear(16, 16, recipe=preset("nvfp4", counter_based=False))) == (
        "recipe 'nvfp4': counter_based is false, and random bits of these modules are functions of a counter. Leave it out."
    )
