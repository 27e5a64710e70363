"""The benchmark of modules on a GPU, in small on the CPU: it runs, and measures what it says."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional

from benchmarks.gpu_modules import BOUND, RECIPES, Size, Way, apart, measured, of_values, pass_of, ways_of
from shardwright.core.recipes.kernels import Device
from shardwright.engine_torch.modules.parts import precision

SMALL = Size(hidden=128, inner=256, tokens=128)


def test_every_recipe_is_measured() -> None:
    found = measured(SMALL, "cpu", 1, ["as it is"])
    assert [one.recipe for one in found] == ["bfloat16", *RECIPES[1:]]
    assert all(min(one.waited, one.in_a_row) > 0 for one in found)
    # A CPU multiplies values in both.
    assert [one.apart for one in found] == [0] * len(found)


@pytest.mark.parametrize(("wrong", "is_found"), [(1.0, False), (1 + 2.0**-5, True)])
def test_products_of_codes_are_compared_with_those_of_values(
    wrong: float, *, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``scaled_mm`` of a CPU stands for that of a GPU."""
    right, calls = functional.scaled_mm, []

    def scaled_mm(*operands: Any, **options: Any) -> torch.Tensor:
        calls.append(operands)
        return right(*operands, **options) * wrong

    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(precision, "product_device", Mock(return_value=Device(kind="GPU", capability=(9, 0))))
    assert (apart(pass_of("fp8-current", Size(hidden=32, inner=32, tokens=32), "cpu")) > BOUND) == is_found
    assert len(calls) == 6  # Of two weights; those of values are none.


@pytest.mark.matrix
# PyTorch's own, of what it traces.
@pytest.mark.filterwarnings("ignore:<class .torch.autograd.function.Function.> should not be instantiated")
@pytest.mark.parametrize("way", ways_of("cpu"))
def test_a_pass_is_the_same_in_every_way(way: Way) -> None:
    made = (pass_of(None, SMALL, "cpu", each)() for each in ("as it is", way))
    assert all(torch.allclose(one, other, rtol=0.02, atol=1e-4) for one, other in zip(*made, strict=True))


def test_passes_have_all_gradients() -> None:
    with of_values():
        made = pass_of("fp8-row", SMALL, "cpu")()
    assert [tuple(one.shape) for one in made] == [(128, 128), (128, 128), (128,), (256, 128), (128, 256)]
    assert {one.dtype for one in made} == {torch.bfloat16}
