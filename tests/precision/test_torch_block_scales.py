"""PyTorch's products of codes in blocks of 16, 32 and 128 on a B200 that is not there: layouts by PyTorch's own checks, scales by
NVIDIA's documentation and torchao, numbers in float64."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torchao.prototype.moe_training.kernels.mxfp8 import quant
from torchao.prototype.mx_formats.utils import to_blocked

from shardwright.core.recipes.kernels import Device, KernelName, product_kernels
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import OPERANDS, Product, Recipe
from shardwright.engine_torch.io.layer_io import LowPrecision
from shardwright.engine_torch.precision.grouped import multiplied_by_expert
from shardwright.engine_torch.precision.kernels import Narrow, multiplied
from shardwright.engine_torch.precision.operands import codes_of, values
from shardwright.engine_torch.precision.products import quantized_grouped_product
from shardwright.engine_torch.precision.scales import swizzled
from tests.precision import documented
from tests.precision.made import ordinary

B200 = Device(kind="GPU", capability=(10, 0))
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp8": ("mxfp8", {}),
    "mxfp8 32x32": ("mxfp8", {"enable_2d_quantization": True}),
    "fp8-block": ("fp8-block", {}),
    "nvfp4": ("nvfp4", {"disable_rht": True, "disable_stochastic_rounding": True}),
    "nvfp4 1x16": (
        "nvfp4",
        {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True},
    ),
}


def recipe(name: str) -> Recipe:
    kind, options = OPTIONS[name]
    return preset(kind, **options)


def kernels_of(name: str, *, experts: bool = False) -> dict[Product, KernelName]:
    chosen = product_kernels(recipe(name).quantizers, B200, "torch", experts=experts, dtype="bfloat16")
    return {product: one.name for product, one in chosen.items()}


def both(
    name: str, product: Product, shapes: tuple[tuple[int, ...], tuple[int, ...]], seed: int = 0
) -> tuple[list[Narrow], list[np.ndarray]]:
    """Both operands of a product, and the values of their codes."""
    narrow, exact = [], []
    for number, (operand, shape) in enumerate(zip(OPERANDS[product], shapes, strict=True)):
        x = torch.from_numpy(ordinary(2 * seed + number, shape)).bfloat16()
        quantizer, dims = recipe(name).quantizers[product, operand], len(shape) - 1
        narrow.append(Narrow(codes_of(x, quantizer, contracted_dims=dims), quantizer, shape))
        exact.append(values(x, quantizer, contracted_dims=dims).double().flatten(1).numpy())
    return narrow, exact


def assert_products(ours: torch.Tensor, x: np.ndarray, y: np.ndarray, where: object) -> None:
    """Equal but for the rounding of a product of two scales of tensors in float32."""
    error = np.abs(ours.double().numpy() - x @ y.T)
    assert (error <= 2.0**-23 * (np.abs(x) @ np.abs(y.T))).all(), where


def compared(name: str, sizes: tuple[int, int, int, int], seed: int = 0) -> None:
    """Rows, tokens of a row, inputs and outputs."""
    rows, length, inputs, outputs = sizes
    tokens = rows * length
    shapes: dict[Product, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "output": ((tokens, inputs), (outputs, inputs)),
        "input_gradient": ((tokens, outputs), (inputs, outputs)),
        "weight_gradient": ((inputs, rows, length), (outputs, rows, length)),
    }
    for product, kernel in kernels_of(name).items():
        narrow, (x, y) = both(name, product, shapes[product], seed)
        ours = multiplied(kernel, *narrow)
        assert ours.shape == (len(x), len(y))
        assert_products(ours, x, y, (product, sizes))


@pytest.fixture
def on_a_b200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "scaled_mm", documented.scaled_mm)
    monkeypatch.setattr(functional, "scaled_grouped_mm", documented.scaled_grouped_mm)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [(2, 128, 192, 256), (3, 20, 72, 24)], ids=["entire blocks", "others"])
def test_all_three_products_are_those_of_the_values(
    name: str, sizes: tuple[int, int, int, int], on_a_b200: None
) -> None:
    del on_a_b200
    assert set(kernels_of(name).values()) == {"nvfp4" if "nvfp4" in name else "mx"}
    compared(name, sizes)


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(40))
def test_products_of_drawn_sizes(seed: int, on_a_b200: None) -> None:
    del on_a_b200
    draw = random.Random(seed)
    sizes = (draw.randint(1, 4), draw.randint(1, 150), draw.randint(1, 300), draw.randint(1, 300))
    compared(draw.choice([*OPTIONS]), sizes, seed)


@pytest.mark.parametrize("seed", range(6))
def test_scales_are_in_the_tiles_that_are_documented(seed: int) -> None:
    """As NVIDIA states their places, and as torchao moves them."""
    draw = random.Random(seed)
    rows, blocks = (1, 1) if not seed else (draw.randint(1, 400), draw.randint(1, 20))
    scales = torch.from_numpy(np.random.default_rng(seed).integers(1, 256, (rows, blocks), np.uint8))
    ours = swizzled(scales)
    assert torch.equal(ours.flatten(), to_blocked(scales))
    assert np.array_equal(documented.in_order(ours, rows, blocks), scales.numpy())


EXPERTS = ((37, 0, 70, 5), (128, 32, 0, 0), (0, 0), (3,))
"""Rows of each expert: parts of blocks, entire ones, none at all, one expert."""


def all_three(name: str, sizes: tuple[int, ...], kernels: dict[Product, KernelName]) -> list[torch.Tensor]:
    inputs, outputs = 72, 40
    x = torch.from_numpy(ordinary(0, (sum(sizes), inputs))).bfloat16().requires_grad_()
    weight = torch.from_numpy(ordinary(1, (len(sizes), outputs, inputs))).bfloat16().requires_grad_()
    low = LowPrecision(quantizers=recipe(name).quantizers, kernels=kernels)
    y = quantized_grouped_product(x, weight, sizes, low, {})
    y.backward(torch.from_numpy(ordinary(2, tuple(y.shape))).bfloat16())
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8 32x32", "fp8-block", "nvfp4"])
@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
def test_products_of_experts_are_those_of_the_values(name: str, sizes: tuple[int, ...], on_a_b200: None) -> None:
    """To the last bit of bfloat16: both sum values that are equal, in float64 and in float32."""
    del on_a_b200
    kernels = kernels_of(name, experts=True)
    assert set(kernels.values()) == {"nvfp4" if "nvfp4" in name else "mx of experts"}
    for ours, needed in zip(all_three(name, sizes, kernels), all_three(name, sizes, {}), strict=True):
        assert ours.dtype == needed.dtype
        torch.testing.assert_close(
            ours, needed, rtol=2.0**-7, atol=2.0**-20 * float(needed.abs().max() if needed.numel() else 0)
        )


@pytest.mark.parametrize("seed", range(4))
def test_scales_of_experts_are_where_torchao_has_them(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, whose width 128 divides there, and of tokens that are contracted; torchao leaves room behind them."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def recorded(*given: Any, **named: Any) -> torch.Tensor:
        calls.append((given[2], given[4], named["offs"]))
        return documented.scaled_grouped_mm(*given, **named)

    monkeypatch.setattr(functional, "scaled_grouped_mm", recorded)
    draw = random.Random(seed)
    sizes = [32 * draw.randint(1, 9) for _ in range(draw.randint(1, 5))]
    inputs, outputs = 128 * draw.randint(1, 3), 16 * draw.randint(1, 17)
    rows = [both("mxfp8", "output", ((size, inputs), (outputs, inputs)), seed + n)[0] for n, size in enumerate(sizes)]
    multiplied_by_expert("mx of experts", "output", *zip(*rows, strict=True))
    of_rows, of_matrices, ends = calls.pop()
    raw = torch.cat([x.found.scales for x, _ in rows])
    theirs, _ = quant.torch_to_blocked_2d_M_groups(raw, ends)
    assert torch.equal(of_rows.view(torch.uint8), theirs.view(torch.uint8)[: len(of_rows)])
    theirs = quant.torch_to_blocked_per_group_3d(torch.stack([y.found.scales for _, y in rows]))
    assert torch.equal(of_matrices.view(torch.uint8), theirs.view(torch.uint8).view(len(sizes), -1))
    tokens = [both("mxfp8", "weight_gradient", ((inputs, n), (outputs, n)), seed)[0] for n in sizes]
    multiplied_by_expert("mx of experts", "weight_gradient", *zip(*tokens, strict=True))
    of_left, of_right, ends = calls.pop()
    for number, ours in enumerate((of_left, of_right)):
        raw = torch.cat([pair[number].found.scales for pair in tokens], 1)
        theirs, _ = quant.torch_to_blocked_2d_K_groups(raw, ends // 32)
        assert torch.equal(ours.view(torch.uint8).flatten(), theirs.view(torch.uint8).flatten()[: ours.numel()])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_a_b200_is_within_its_bound_of_the_values(name: str) -> None:
    """Sums in float32, and 8 bits of the result; also of sizes that no block divides, and of experts."""
    if torch.cuda.get_device_capability() < (10, 0):
        pytest.skip("the GPU has no products of these codes")
    for product, kernel in kernels_of(name).items():
        for shapes in (((256, 512), (256, 512)), ((40, 72), (24, 72))):
            narrow, (x, y) = both(name, product, shapes)
            on_gpu = [
                one._replace(
                    found=one.found._replace(
                        **{field: array.cuda() for field, array in one.found._asdict().items() if array is not None}
                    )
                )
                for one in narrow
            ]
            ours = multiplied(kernel, *on_gpu).double().cpu().numpy()
            bound = 2.0**-8 * np.abs(x @ y.T) + 2.0**-13 * (np.abs(x) @ np.abs(y.T))
            assert (np.abs(ours - x @ y.T) <= bound).all(), (product, shapes)
