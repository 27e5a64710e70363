"""Modules on a GPU that multiplies codes. Without one, the device is said to be there: PyTorch's products of codes per tensor and per row
run on a CPU too, and those of blocks have their layouts checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from shardwright.core.recipes.kernels import CPU, Device
from shardwright.engine_torch.modules import GroupedLinear, LayerNormLinear, LayerNormMLP, Linear
from shardwright.engine_torch.modules.parallel import ParallelModule
from shardwright.engine_torch.modules.parts import precision
from shardwright.engine_torch.precision.kernels import product_device
from tests.precision import documented

B200, H100, A100 = (Device(kind="GPU", capability=capability) for capability in ((10, 0), (9, 0), (8, 0)))
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
GRADIENTS = {"fp8-current": E5M2, "fp8-delayed": E5M2, "fp8-row": E4M3, "fp8-block": E4M3}
PRODUCTS = {"fp8-current": 3, "fp8-delayed": 3, "fp8-row": 2, "fp8-block": 3}
"""Of codes, for each weight: fp8-row has weight gradients in high precision."""
BY_ROWS = ("fp8-row",)
ROUNDED = 2.0**-8
"""A sum in bfloat16, to which both round, beside sums in another order."""

SCALED_MM = functional.scaled_mm

Made = tuple[ParallelModule, Callable[[ParallelModule, torch.Tensor], torch.Tensor], int]
MODULES: Mapping[str, Callable[[str], Made]] = {
    "Linear": lambda recipe: (Linear(40, 24, recipe=recipe), lambda module, x: module(x), 1),
    "LayerNormLinear": lambda recipe: (LayerNormLinear(40, 24, recipe=recipe), lambda module, x: module(x), 1),
    "GroupedLinear": lambda recipe: (
        GroupedLinear(3, 40, 24, recipe=recipe),
        lambda module, x: module(x.flatten(0, 1), [9, 0, 6]),
        3,
    ),
}
"""A module, a call of it, and its weights. One layer of the grouped ones has no tokens."""


def on(device: Device, patch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Has modules multiply as on a device; what each product of codes is given."""
    calls: list[dict[str, Any]] = []
    scaled_mm = functional.scaled_mm

    def recorded(*given: Any, **named: Any) -> torch.Tensor:
        calls.append(
            {**dict(zip(("left", "right", "of_left", "kind", "of_right", "kind_right"), given, strict=True)), **named}
        )
        return scaled_mm(*given, **named)

    patch.setattr(precision, "product_device", lambda _: device)
    patch.setattr(functional, "scaled_mm", recorded)
    return calls


def trained(made: Callable[[str], Made], recipe: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of each parameter."""
    torch.manual_seed(5)
    module, call, _ = made(recipe)
    x = torch.randn(3, 5, 40, dtype=dtype, requires_grad=True)
    y = call(module, x)
    y.backward(torch.randn_like(y))
    gradients = [one.grad for one in (x, *module.parameters())]
    assert all(one is not None for one in gradients)
    return [y.detach(), *(one for one in gradients if one is not None)]


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-row"])
@pytest.mark.parametrize("kind", MODULES)
def test_codes_are_multiplied_where_the_device_does(kind: str, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_values = trained(MODULES[kind], recipe)
    calls = on(H100, monkeypatch)
    of_codes = trained(MODULES[kind], recipe)
    for codes, values in zip(of_codes, of_values, strict=True):
        apart = (codes.double() - values.double()).abs().max()
        assert apart <= ROUNDED * values.double().abs().max()
    weights = MODULES[kind](recipe)[2]
    # A product without rows is made without a call.
    with_rows = 2 if kind == "GroupedLinear" else weights
    assert len(calls) == with_rows * PRODUCTS[recipe]
    by = functional.ScalingType.RowWise if recipe in BY_ROWS else functional.ScalingType.TensorWise
    for one in calls:
        assert one["kind"] == one["kind_right"] == by
        assert not one["use_fast_accum"]
        assert one["output_dtype"] == torch.bfloat16
        assert one["left"].is_contiguous()
        assert one["right"].T.is_contiguous()
    formats = [{one["left"].dtype, one["right"].dtype} for one in calls]
    assert formats[:with_rows] == [{E4M3}] * with_rows
    assert all(GRADIENTS[recipe] in found for found in formats[with_rows:])


def test_an_mlp_multiplies_the_codes_of_all_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = on(H100, monkeypatch)
    trained(
        lambda recipe: (LayerNormMLP(40, 24, activation="swiglu", recipe=recipe), lambda module, x: module(x), 3),
        "fp8-row",
    )
    assert len(calls) == 3 * PRODUCTS["fp8-row"]


@pytest.mark.parametrize(
    ("recipe", "device", "dtype"),
    [
        ("fp8-current", H100, torch.float32),
        ("fp8-current", A100, torch.bfloat16),
        ("mxfp8", H100, torch.bfloat16),
        ("fp8-current", CPU, torch.bfloat16),
    ],
    ids=["float32 tokens", "no FP8", "blocks of 32", "a CPU"],
)
def test_values_are_multiplied_elsewhere(
    recipe: str, device: Device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = trained(MODULES["Linear"], recipe, dtype)
    calls = on(device, monkeypatch)
    found = trained(MODULES["Linear"], recipe, dtype)
    assert not calls
    for ours, theirs in zip(found, needed, strict=True):
        assert torch.equal(ours, theirs)


def by_blocks(scales: torch.Tensor, kind: functional.ScalingType, shape: torch.Size) -> torch.Tensor:
    """The scale of each element of an operand, rows first, as PyTorch documents its scales."""
    name = kind.name
    if name.startswith("BlockWise"):
        other, contracted = (int(one) for one in name.removeprefix("BlockWise").split("x"))
        # Scales of square blocks have the contracted dim first.
        scales = scales.T if other > 1 else scales
        scales = scales.repeat_interleave(other, 0).repeat_interleave(contracted, 1)
        return scales[: shape[0], : shape[1]]
    return scales.reshape(-1, 1).expand(shape)


def as_a_gpu_has_them(left: torch.Tensor, right: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """The product of codes times scales. PyTorch checks the layouts as those of a GPU."""
    of_left, kind, of_right, kind_right = given
    with FakeTensorMode():
        tensors = [
            torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cuda")
            for one in (left, right, of_left, of_right)
        ]
        checked = SCALED_MM(tensors[0], tensors[1], tensors[2], kind, tensors[3], kind_right, **named)
    x = left.float() * by_blocks(of_left, kind, left.shape)
    y = right.T.float() * by_blocks(of_right, kind_right, right.T.shape)
    assert checked.shape == (len(x), len(y))
    return (x @ y.T).to(checked.dtype)


@pytest.mark.parametrize("sizes", [(2, 256, 384, 256), (3, 17, 136, 72)], ids=["entire blocks", "others"])
@pytest.mark.parametrize("recipe", PRODUCTS)
def test_a_gpu_takes_what_a_module_gives(
    recipe: str, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, tokens of a row, inputs and outputs."""
    rows, length, inputs, outputs = sizes

    def step() -> list[torch.Tensor]:
        torch.manual_seed(6)
        module = Linear(inputs, outputs, recipe=recipe)
        x = torch.randn(rows, length, inputs, dtype=torch.bfloat16, requires_grad=True)
        y = module(x)
        y.backward(torch.randn_like(y))
        assert x.grad is not None
        assert module.weight.grad is not None
        return [y.detach(), x.grad, module.weight.grad]

    of_values = step()
    monkeypatch.setattr(functional, "scaled_mm", as_a_gpu_has_them)
    calls = on(H100, monkeypatch)
    for codes, values in zip(step(), of_values, strict=True):
        assert (codes.double() - values.double()).abs().max() <= ROUNDED * values.double().abs().max()
    assert len(calls) == PRODUCTS[recipe]
    if recipe == "fp8-block":
        kinds = [(one["kind"].name, one["kind_right"].name) for one in calls]
        square, line = "BlockWise128x128", "BlockWise1x128"
        assert kinds == [(line, square), (line, square), (line, line)]


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-block"])
def test_a_b200_takes_what_a_module_gives(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes in blocks, of sizes that they do not divide; NVFP4 with its transform and its random bits."""
    of_values = trained(MODULES["GroupedLinear"], recipe)
    monkeypatch.setattr(functional, "scaled_mm", documented.scaled_mm)
    calls = on(B200, monkeypatch)
    for codes, values in zip(trained(MODULES["GroupedLinear"], recipe), of_values, strict=True):
        assert (codes.double() - values.double()).abs().max() <= ROUNDED * values.double().abs().max()
    assert len(calls) == 2 * 3
    formats = {one["left"].dtype for one in calls}
    assert formats == {torch.float4_e2m1fn_x2 if recipe == "nvfp4" else E4M3}


def test_a_gpu_that_is_not_there_multiplies_values() -> None:
    if torch.cuda.is_available():
        assert product_device("cuda").kind == "GPU"
    else:
        assert product_device("cuda") == CPU
