"""The loss over the vocabulary with the logits of one chunk of a rank's tokens at a time: no tensor has those of all.

A chunk is a run of the rank's tokens, row after row: neither rows nor the length must be divisible, only their product, and
nothing is sent. The gradients are made in the forward pass, while a chunk's logits are there, so that nothing is computed twice: the
loss is a sum over tokens, and the backward pass multiplies its gradients by one number. The weight's gradient is summed over the
chunks in float32 and rounded once, as the gradient of all tokens is.

B rows, L tokens, M embed, V vocabulary entries of this rank; C chunks, each one row of the tokens of a chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from shardwright.engine_torch.io.dtypes import computed, kept
from shardwright.engine_torch.layers.embedding import Scoring, scores
from shardwright.engine_torch.layers.loss import summed_cross_entropy, with_cotangent
from shardwright.engine_torch.layers.product import add_product


class _Chunk(NamedTuple):
    """The projection's input, and of each token its target and whether it counts."""

    x_BLM: torch.Tensor
    targets_BL: torch.Tensor
    valid_BL: torch.Tensor


def chunked_cross_entropy(
    x_BLM: torch.Tensor,
    kernel_VM: torch.Tensor,
    targets_BL: torch.Tensor,
    valid_BL: torch.Tensor,
    scoring: Scoring,
    chunks: int,
) -> torch.Tensor:
    """The sum over the valid tokens of minus the log-probability of the target, in so many chunks.

    ``x_BLM``: the input of the product of the scores, which is not quantized and with which nothing else is done.
    """
    assert scoring.low is None, scoring.low
    assert not scoring.on_each, scoring.on_each
    return _Summed.apply(x_BLM, kernel_VM, targets_BL, valid_BL, scoring, chunks)  # pyright: ignore[reportReturnType]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BLM: torch.Tensor,
        kernel_VM: torch.Tensor,
        targets_BL: torch.Tensor,
        valid_BL: torch.Tensor,
        scoring: Scoring,
        num: int,
    ) -> torch.Tensor:
        chunked = (num, 1, -1)
        x_CBLM = x_BLM.reshape(*chunked, x_BLM.shape[-1])
        chunks = list(map(_Chunk, x_CBLM, targets_BL.reshape(chunked), valid_BL.reshape(chunked)))
        total = torch.zeros((), dtype=computed("loss", x_BLM.dtype), device=x_BLM.device)
        if not any(ctx.needs_input_grad):
            return sum((_loss(chunk, kernel_VM, scoring) for chunk in chunks), total)
        cotangent_CBLM = torch.empty_like(x_CBLM)
        gradient_VM = torch.zeros_like(kernel_VM, dtype=computed("gradient", kernel_VM.dtype))
        for chunk, cotangent_BLM in zip(chunks, cotangent_CBLM, strict=True):
            total += _with_gradients(chunk, kernel_VM, scoring, cotangent_BLM, gradient_VM)
        ctx.save_for_backward(cotangent_CBLM.view_as(x_BLM), gradient_VM.to(kernel_VM.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        cotangent_BLM, gradient_VM = (one * cotangents[0].to(one.dtype) for one in ctx.saved_tensors)
        return cotangent_BLM, gradient_VM, None, None, None, None


def _loss(chunk: _Chunk, kernel_VM: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    scores_BLV = scores(chunk.x_BLM, kernel_VM, scoring)
    return summed_cross_entropy(scores_BLV, chunk.targets_BL, chunk.valid_BL, scoring.peers)


def _with_gradients(
    chunk: _Chunk, kernel_VM: torch.Tensor, scoring: Scoring, cotangent_BLM: torch.Tensor, gradient_VM: torch.Tensor
) -> torch.Tensor:
    """The loss of a chunk. Its input's cotangent is written, and its weight's gradient added, in place."""
    scores_BLV = scores(chunk.x_BLM, kernel_VM, scoring)
    loss, cotangent_BLV = with_cotangent(scores_BLV, chunk.targets_BL, chunk.valid_BL, scoring.peers)
    # The logits are as large as all else of a chunk.
    del scores_BLV
    cotangent_BLV = cotangent_BLV.to(kept("cotangent", chunk.x_BLM.dtype))
    cotangent_BLM.copy_(cotangent_BLV @ kernel_VM)
    add_product(gradient_VM, cotangent_BLV.flatten(0, 1).mT, chunk.x_BLM.flatten(0, 1))
    return loss
