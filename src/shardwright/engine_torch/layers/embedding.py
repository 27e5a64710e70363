"""The embedding and the logits: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from shardwright.core.program.primitives import Cap, Scale
from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.layer_io import ALONE, LowPrecision
from shardwright.engine_torch.io.mesh import Peers
from shardwright.engine_torch.layers.elementwise import capped
from shardwright.engine_torch.layers.product import weight_product


def embed(ids_BL: torch.Tensor, table_VM: torch.Tensor, peers: Peers = ALONE) -> torch.Tensor:
    """The embedding of each token, BLM.

    ``peers``: the ranks that shard the vocabulary. Each looks up the tokens of its own entries and has zeros for the others; their sum is
    the embedding.
    """
    if peers.group is None:
        return rows_of(table_VM, ids_BL)
    V = table_VM.shape[0]
    own_BL = ids_BL - peers.index * V
    is_own_BL = (own_BL >= 0) & (own_BL < V)
    return rows_of(table_VM, own_BL.clamp(0, V - 1)) * is_own_BL[..., None].to(table_VM.dtype)


def rows_of(table_VM: torch.Tensor, ids_BL: torch.Tensor) -> torch.Tensor:
    """The row of each id, BLM."""
    return _Rows.apply(table_VM, ids_BL)  # pyright: ignore[reportReturnType]


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, table_VM: torch.Tensor, ids_BL: torch.Tensor) -> torch.Tensor:
        ctx.num = table_VM.shape[0]
        ctx.save_for_backward(ids_BL)
        return functional.embedding(ids_BL, table_VM)

    @staticmethod
    def backward(ctx, *cotangents: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids_BL,), cotangent_BLM = ctx.saved_tensors, cotangents[0]
        # Summed in a wider dtype, because a frequent token adds thousands of cotangents to one row.
        wide_BLM = cotangent_BLM.to(computed("gradient", cotangent_BLM.dtype))
        sums_VM = torch.ops.aten.embedding_dense_backward(wide_BLM, ids_BL, ctx.num, -1, False)
        return sums_VM.to(cotangent_BLM.dtype), None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How logits are made of the last layer's output: how their product with a weight is quantized, if it is, and its ``dtype``; what is done
    ``on_each`` of them; the ``peers`` that shard the vocabulary; and, of one that is padded in memory, the number of ``entries``."""

    dtype: torch.dtype | None = None
    low: LowPrecision | None = None
    on_each: tuple[Cap | Scale, ...] = ()
    peers: Peers = ALONE
    entries: int | None = None


def scores(x_BLM: torch.Tensor, kernel_VM: Any, scoring: Scoring) -> torch.Tensor:
    """The logits, BLV. ``kernel_VM``: in use."""
    logits_BLV = weight_product(x_BLM, kernel_VM, scoring.low, dtype=scoring.dtype)
    for does in scoring.on_each:
        logits_BLV = logits_BLV * does.factor if isinstance(does, Scale) else capped(logits_BLV, does.limit)
    return without_padding(logits_BLV, scoring)


def without_padding(logits_BLV: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """The logits with those of a padded vocabulary's padding at minus infinity: their probabilities and gradients are zero."""
    if scoring.entries is None:
        return logits_BLV
    V = logits_BLV.shape[-1]
    first = scoring.peers.index * V
    is_padding_V = torch.arange(first, first + V, device=logits_BLV.device) >= scoring.entries
    return logits_BLV.masked_fill(is_padding_V, -torch.inf)
