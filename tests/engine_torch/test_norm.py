"""RMS normalization on PyTorch: autograd's numbers, less saved, and no work that a split backward pass does not ask for."""

from __future__ import annotations

import pytest
import torch

from shardwright.engine_torch.layers import norm
from shardwright.engine_torch.layers.norm import rms_norm

EPS = 1e-3


def made(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(3, 5, 8, dtype=dtype, requires_grad=True), torch.randn(8, requires_grad=True)


def by_autograd(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * scale).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_has_the_numbers_of_autograd(dtype: torch.dtype) -> None:
    x, scale = made(dtype)
    ours, theirs = rms_norm(x, scale, EPS), by_autograd(x, scale)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    cotangent = torch.randn_like(ours)
    gradients = [torch.autograd.grad(one, (x, scale), cotangent) for one in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_besides_its_operands_it_saves_a_number_for_each_token() -> None:
    (x, scale), saved = made(), set[tuple[int, int]]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.add((tensor.data_ptr(), tensor.numel()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        rms_norm(x, scale, EPS)
    others = saved - {(one.data_ptr(), one.numel()) for one in (x, scale)}
    assert [number for _, number in others] == [x.shape[0] * x.shape[1]]


def test_each_half_of_a_split_backward_pass_makes_its_own_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A zero-bubble schedule asks for the gradients of inputs and of weights apart."""
    x, scale = made()
    expected = torch.autograd.grad(rms_norm(x, scale, EPS).sum(), (x, scale))
    made_now: list[str] = []

    def counted(name: str) -> None:
        function = getattr(norm, name)
        monkeypatch.setattr(norm, name, lambda *operands: made_now.append(name) or function(*operands))

    counted("_of_input")
    counted("_of_scale")
    total = rms_norm(x, scale, EPS, split=True).sum()
    for one, name, needed in zip((x, scale), ("_of_input", "_of_scale"), expected, strict=True):
        made_now.clear()
        (found,) = torch.autograd.grad(total, one, retain_graph=True)
        torch.testing.assert_close(found, needed, rtol=0, atol=0)
        assert made_now == [name]


def test_its_backward_pass_is_one_graph_whatever_the_strides_are() -> None:
    """A GPU has it as a kernel of ``torch.compile``, which takes no result in an array that is not contiguous."""
    x, cotangent = torch.randn(8, 4).T, torch.randn(8, 4).T
    scale, factor = torch.randn(8), torch.rand(4, 1) + 1
    compiled = torch.compile(norm._of_input, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(cotangent, x, scale, factor), norm._of_input(cotangent, x, scale, factor))
