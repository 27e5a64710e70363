"""Delayed scaling where a step is not like those before: on another number of ranks, with other weights, with larger tokens."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.engine_torch import load, save
from shardwright.engine_torch.io.private import COMPILES_WHOLE
from shardwright.engine_torch.modules import update_scales
from tests.engine_torch.own_delayed import mean_step, network, next_gradients, saved_after_steps, sources
from tests.engine_torch.ranks import Ranks

NUMBERS = (1, 2, 3, 4, 8)
COVERING = ((4, 8), (1, 3), (8, 1))
WIDE = [pair for pair in product(NUMBERS, NUMBERS) if pair not in COVERING]


@pytest.mark.parametrize(
    ("saved", "loaded"), [*COVERING, *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in WIDE)]
)
def test_the_first_gradient_on_another_number_of_ranks_is_that_of_one_process(
    eight: Ranks, saved: int, loaded: int, tmp_path: Path
) -> None:
    eight.first(saved).run(saved_after_steps, tmp_path)
    (needed,) = (np.array(gradient) for gradient in eight.first(1).run(next_gradients, tmp_path)[0][:1])
    for gradient in eight.first(loaded).run(next_gradients, tmp_path)[0]:
        apart = np.linalg.norm(np.array(gradient) - needed) / np.linalg.norm(needed)
        assert apart <= 0.02, (saved, loaded, apart)


def test_on_as_many_ranks_nothing_changes(four: Ranks, tmp_path: Path) -> None:
    going_on = four.run(saved_after_steps, tmp_path)
    assert four.run(next_gradients, tmp_path) == [[gradient, gradient] for gradient in going_on]


def loaded_by_name(module: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    other = network()
    other.load_state_dict(weights, strict=False)
    save(folder, other, step=1)
    load(folder, module, only=["*weight", "*bias"])


def loaded_as_a_dict(module: nn.Module, weights: dict[str, torch.Tensor], folder: Path) -> None:
    del folder
    module.load_state_dict(weights, strict=False)


@pytest.mark.parametrize("loaded", [loaded_by_name, loaded_as_a_dict])
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_from_elsewhere_have_factors_of_their_own(
    loaded: Callable[[nn.Module, dict[str, torch.Tensor], Path], None], steps: int, tmp_path: Path
) -> None:
    """In the first step those of the recipe whose amaxes are current; and then those of both."""
    module, current = network(), network("fp8-current")
    for number in range(steps):
        mean_step(module, number)
    weights = {name: 1000 * weight.detach() for name, weight in current.named_parameters()}
    loaded(module, weights, tmp_path)
    loaded_as_a_dict(current, weights, tmp_path)
    needed = torch.tensor(mean_step(current, 3))
    torch.testing.assert_close(torch.tensor(mean_step(module, 3)), needed, rtol=0, atol=0)
    again = torch.tensor(mean_step(module, 3))
    assert float((again - needed).norm() / needed.norm()) < 0.02


@pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.> should not be instantiated")
def test_a_compiled_module_measures_after_a_load_too() -> None:
    module, current = network(), network("fp8-current")
    compiled = torch.compile(module, fullgraph=COMPILES_WHOLE, backend="eager")
    assert isinstance(compiled, nn.Module)
    mean_step(compiled, 0)
    weights = {name: 1000 * weight.detach() for name, weight in current.named_parameters()}
    for network_of in (module, current):
        network_of.load_state_dict(weights, strict=False)
    assert mean_step(compiled, 3) == mean_step(current, 3)


def test_sources_of_tokens_are_those_of_data_ranks(four: Ranks) -> None:
    assert four.run(sources) == [(4, 2)] * 4


def test_elements_beyond_their_factor_are_reported() -> None:
    module = network()
    for number in range(2):
        mean_step(module, number)
    with torch.no_grad():
        module[1].weight *= 1000  # pyright: ignore[reportOperatorIssue, reportArgumentType]
    with pytest.warns(UserWarning, match="times what its factor holds") as caught:
        mean_step(module, 2)
    (text,) = (str(warning.message) for warning in caught)
    assert re.sub(r"[0-9.e+]+ times", "N times", text) == (
        "Linear at 1: weight of 'weight' was up to N times what its factor holds (3 more of 12 operands also overflowed): such elements "
        "had the largest code, so the gradients of this step are too small. The factors of the next step hold them. Tokens, weights or "
        "the loss are larger than in the steps before; margin=1 of the recipe leaves room for twice as large ones."
    )


def test_an_overflow_of_nothing_is_no_warning() -> None:
    """No token, no step, and an element that is not finite, which has its own signs."""
    module = network()
    update_scales(module)
    mean_step(module, 0)
    (module(torch.full((2, 32), torch.nan)) * 1e-4).sum().backward()
    update_scales(module)
