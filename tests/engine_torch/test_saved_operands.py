"""Norms and hidden units save their operands alone, and have the bits that autograd has of the same operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from shardwright.engine_torch.layers.gate import gated
from shardwright.engine_torch.layers.norm import rms_norm

EPS = 1e-5
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def plain_norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    factor = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS)
    return (wide * factor * scale.to(wide.dtype)).to(x.dtype)


def plain_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return functional.silu(gate) * up


def norm(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, scale, EPS)


def result_and_gradients(function: Function, *operands: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
    """With the elements of each storage that is saved, in ascending order."""
    saved: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved[x.untyped_storage().data_ptr()] = x.numel()
        return x

    own = [one.clone().requires_grad_() for one in operands]
    with saved_tensors_hooks(pack, lambda x: x):
        result = function(*own)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, own, cotangent)], sorted(saved.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("function", "plain", "second", "saved"),
    [(norm, plain_norm, (128,), [2 * 16, 128, 2 * 16 * 128]), (gated, plain_gated, (2, 16, 128), [2 * 16 * 128] * 2)],
    ids=["norm", "gated"],
)
def test_the_bits_are_those_of_autograd(
    function: Function, plain: Function, second: tuple[int, ...], saved: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    operands = torch.randn(2, 16, 128).to(dtype), torch.randn(second).to(dtype)
    ours, kept = result_and_gradients(function, *operands)
    theirs, _ = result_and_gradients(plain, *operands)
    assert kept == saved
    assert all(map(torch.equal, ours, theirs))
