"""PyTorch's products of codes: shapes and layouts on a GPU that is not there, and numbers on a CPU, which has two of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwright.core.recipes.kernels import Device, KernelName, product_kernels
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import OPERANDS, Product
from shardwright.engine_torch.precision.kernels import Narrow, multiplied
from shardwright.engine_torch.precision.operands import codes_of, values
from tests.precision.made import ordinary

H100 = Device(kind="GPU", capability=(9, 0))
KERNELS: dict[str, KernelName] = {"fp8-current": "fp8", "fp8-row": "fp8", "fp8-block": "fp8 by blocks"}


def kernels_of(recipe: str) -> dict[Product, KernelName]:
    chosen = product_kernels(preset(recipe).quantizers, H100, "torch", experts=False, dtype="bfloat16")
    return {product: one.name for product, one in chosen.items()}


@pytest.mark.parametrize("recipe", KERNELS)
@pytest.mark.parametrize("sizes", [(2, 256, 512, 384), (3, 40, 136, 24)])
def test_a_gpu_takes_the_layouts_of_all_three_products(recipe: str, sizes: tuple[int, int, int, int]) -> None:
    """Rows, tokens of a row, inputs and outputs: sizes that blocks divide, and others. PyTorch checks layouts without a GPU."""
    rows, length, inputs, outputs = sizes
    kernels = kernels_of(recipe)
    assert set(kernels.values()) == {KERNELS[recipe]}
    quantizers = preset(recipe).quantizers
    tokens = rows * length
    shapes = {
        "output": ((tokens, inputs), (outputs, inputs)),
        "input_gradient": ((tokens, outputs), (inputs, outputs)),
        "weight_gradient": ((inputs, rows, length), (outputs, rows, length)),
    }
    for product, kernel in kernels.items():
        with FakeTensorMode():
            narrow = []
            for operand, shape in zip(OPERANDS[product], shapes[product], strict=True):
                x, quantizer = torch.empty(shape, dtype=torch.bfloat16, device="cuda"), quantizers[product, operand]
                narrow.append(Narrow(codes_of(x, quantizer, contracted_dims=len(shape) - 1), quantizer, shape))
            found = multiplied(kernel, *narrow)
        assert found.shape == tuple(shape[0] for shape in shapes[product])
        assert (found.dtype, found.device.type) == (torch.bfloat16, "cuda")


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-row"])
def test_a_product_is_that_of_the_values_of_the_codes(recipe: str) -> None:
    """Of sizes that 16 does not divide. The result has 8 bits, as bfloat16 has."""
    quantizers, shapes = preset(recipe).quantizers, [(5, 24), (7, 24)]
    for product in kernels_of(recipe):
        narrow, exact = [], []
        for number, (operand, shape) in enumerate(zip(OPERANDS[product], shapes, strict=True)):
            x, quantizer = torch.from_numpy(ordinary(number, shape)), quantizers[product, operand]
            narrow.append(Narrow(codes_of(x, quantizer), quantizer, shape))
            exact.append(values(x, quantizer).double().numpy())
        ours = multiplied("fp8", *narrow).double().numpy()
        x, y = exact
        bound = 2.0**-8 * np.abs(x @ y.T) + 26 * 2.0**-24 * (np.abs(x) @ np.abs(y.T))
        assert (np.abs(ours - x @ y.T) <= bound).all(), product


def test_an_expert_without_rows_has_products_without_rows() -> None:
    quantizer = preset("fp8-row").quantizers["output", "input"]
    none, some = torch.zeros((0, 24)), torch.zeros((7, 24))
    found = multiplied("fp8", *(Narrow(codes_of(x, quantizer), quantizer, x.shape) for x in (none, some)))
    assert found.shape == (0, 7)


def test_experts_without_rows_have_products_of_zeros() -> None:
    quantizer = preset("fp8-current").quantizers["weight_gradient", "input"]
    none, some = torch.zeros((8, 0)), torch.zeros((4, 0))
    found = multiplied("fp8", *(Narrow(codes_of(x, quantizer), quantizer, x.shape) for x in (none, some)))
    assert found.shape == (8, 4)
    assert not found.any()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", KERNELS)
def test_a_gpu_is_within_its_bound_of_the_values(recipe: str) -> None:
    """An H100 adds products of FP8 with about 13 bits of fraction: 2^-13 for each partial sum of 128, and 8 bits of the result."""
    quantizers = preset(recipe).quantizers
    for product, kernel in kernels_of(recipe).items():
        narrow, exact = [], []
        for number, operand in enumerate(OPERANDS[product]):
            x, quantizer = torch.from_numpy(ordinary(number, (256, 512))).cuda(), quantizers[product, operand]
            narrow.append(Narrow(codes_of(x, quantizer), quantizer, x.shape))
            exact.append(values(x, quantizer).double().cpu().numpy())
        ours = multiplied(kernel, *narrow).double().cpu().numpy()
        x, y = exact
        bound = 2.0**-8 * np.abs(x @ y.T) + 2.0**-13 * (np.abs(x) @ np.abs(y.T))
        assert (np.abs(ours - x @ y.T) <= bound).all(), product
