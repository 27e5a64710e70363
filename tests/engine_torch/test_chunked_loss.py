"""The loss in chunks, with both gradients, against PyTorch's cross-entropy of all tokens in float64; and that no tensor is as large as the
logits of all tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardwright.engine_torch.layers.chunked_loss import chunked_cross_entropy
from shardwright.engine_torch.layers.embedding import Scoring

ROWS, LENGTH, VOCAB, EMBED = 3, 7, 11, 5


def scoring_of(entries: int | None = None) -> Scoring:
    return Scoring(dtype=torch.float32, entries=entries)


def operands(dtype: torch.dtype, device: str = "cpu") -> list[torch.Tensor]:
    """The projection's input, its weight, the targets and the valid tokens; one row has none."""
    generator = torch.Generator().manual_seed(0)
    x_BLM = torch.randn((ROWS, LENGTH, EMBED), generator=generator).to(dtype)
    kernel_VM = torch.randn((VOCAB, EMBED), generator=generator).to(dtype)
    targets_BL = torch.randint(0, VOCAB - 2, (ROWS, LENGTH), generator=generator, dtype=torch.int32)
    valid_BL = torch.rand((ROWS, LENGTH), generator=generator) < 0.6
    valid_BL[1] = False
    return [one.to(device) for one in (x_BLM, kernel_VM, targets_BL, valid_BL)]


def gradients(given: list[torch.Tensor], chunks: int, entries: int | None = None) -> list[torch.Tensor]:
    """The loss, times 3, and the gradients of the input and of the weight."""
    x_BLM, kernel_VM = (one.clone().requires_grad_() for one in given[:2])
    loss = 3 * chunked_cross_entropy(x_BLM, kernel_VM, given[2], given[3], scoring_of(entries), chunks)
    loss.backward()
    assert x_BLM.grad is not None
    assert kernel_VM.grad is not None
    return [loss.detach(), x_BLM.grad, kernel_VM.grad]


def in_float64(given: list[torch.Tensor], entries: int = VOCAB) -> list[torch.Tensor]:
    x_BLM, kernel_VM = (one.double().requires_grad_() for one in given[:2])
    logits = (x_BLM @ kernel_VM.T).flatten(0, 1)[:, :entries]
    targets = given[2].long().where(given[3], -100).flatten()
    loss = 3 * torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss.backward()
    assert x_BLM.grad is not None
    assert kernel_VM.grad is not None
    return [loss.detach(), x_BLM.grad, kernel_VM.grad]


@pytest.mark.parametrize("entries", [None, VOCAB - 2])
@pytest.mark.parametrize("chunks", [3, 7, ROWS * LENGTH])
def test_chunks_have_the_loss_and_the_gradients_of_all_tokens(chunks: int, entries: int | None) -> None:
    """Chunks end with rows, inside rows, and after each token. ``entries``: the others are padding."""
    given = operands(torch.float32)
    for ours, theirs in zip(gradients(given, chunks, entries), in_float64(given, entries or VOCAB), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-6, atol=2e-6 * float(theirs.abs().max()))


def assert_rounded_once(device: str) -> None:
    """Of the same rounded cotangents: a sum over chunks in float32 is at most rounded to a neighbour of that of all tokens."""
    given = operands(torch.bfloat16, device)
    *_, chunked = gradients(given, ROWS * LENGTH)
    *_, whole = gradients(given, 1)
    *_, exact = in_float64(given)
    assert chunked.dtype == torch.bfloat16
    assert bool(((chunked.double() - whole.double()).abs() <= exact.abs() * 2.0**-7).all())
    assert float((chunked == whole).double().mean()) > 0.9


def test_a_weight_s_gradient_in_bfloat16_is_rounded_once() -> None:
    assert_rounded_once("cpu")


@pytest.mark.gpu
def test_a_weight_s_gradient_in_bfloat16_is_rounded_once_on_a_gpu() -> None:
    assert_rounded_once("cuda")


def test_without_gradients_nothing_but_the_loss_is_made() -> None:
    given = operands(torch.float32)
    with _Largest() as mode:
        loss = 3 * chunked_cross_entropy(given[0], given[1], given[2], given[3], scoring_of(), 7)
    assert not loss.requires_grad
    torch.testing.assert_close(loss.double(), in_float64(given)[0], rtol=1e-6, atol=0.0)
    assert mode.largest == ROWS * LENGTH * EMBED


def test_no_tensor_is_as_large_as_the_logits() -> None:
    found = {}
    for chunks in (1, 7):
        with _Largest() as mode:
            gradients(operands(torch.float32), chunks)
        found[chunks] = mode.largest
    assert found == {1: ROWS * LENGTH * VOCAB, 7: ROWS * LENGTH * EMBED}


class _Largest(TorchDispatchMode):
    """The number of elements of the largest result of any operation."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (one.numel() for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        self.largest = max(self.largest, *sizes, 0)
        return result
