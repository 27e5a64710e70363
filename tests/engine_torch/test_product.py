"""Products whose result has a wider dtype than the operands."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine_torch.layers.product import product

SHAPES = [((2, 3, 16), (16, 8)), ((6, 16), (16, 8)), ((4, 3, 16), (4, 16, 8))]


def assert_wide(x_shape: tuple[int, ...], y_shape: tuple[int, ...], device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(x_shape, generator=generator).bfloat16().to(device).requires_grad_()
    y = torch.randn(y_shape, generator=generator).bfloat16().to(device).requires_grad_()
    result = product(x, y, torch.float32)
    wide = [one.detach().double().requires_grad_() for one in (x, y)]
    expected = wide[0] @ wide[1]
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    result.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip((x, y), wide, strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(("x_shape", "y_shape"), SHAPES)
def test_a_product_is_wide(x_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    assert_wide(x_shape, y_shape, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize(("x_shape", "y_shape"), SHAPES)
def test_a_product_is_wide_on_a_gpu(x_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> None:
    assert_wide(x_shape, y_shape, "cuda")
