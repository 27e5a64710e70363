"""The embedding and the logits: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from shardwright.engine_torch.io.dtypes import computed
from shardwright.engine_torch.io.layer_io import InUse, Links, LowPrecision, Params
from shardwright.engine_torch.layers.product import weight_product


def embed(tokens_BL: torch.Tensor, params: Params, links: Links) -> torch.Tensor:
    """The embedding of each token, BLM, in the residual stream's layout.

    If the vocabulary is sharded, each rank looks up the tokens of its own entries and has zeros for the others; the move to
    the residual stream sums them.
    """
    table_VM = links.use("embedding.tokens", params["embedding.tokens"])
    ids_BL = links.move("input.tokens", "embedding.ids", tokens_BL)
    peers = links.vocab.get("embedding")
    if peers is None or peers.group is None:
        x_BLM = rows_of(table_VM, ids_BL)
    else:
        V = table_VM.shape[0]
        own_BL = ids_BL - peers.index * V
        is_own_BL = (own_BL >= 0) & (own_BL < V)
        x_BLM = rows_of(table_VM, own_BL.clamp(0, V - 1)) * is_own_BL[..., None].to(table_VM.dtype)
    return links.move("embedding.output", "residual.stream", x_BLM)


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


class Projection(NamedTuple):
    """The weight of the logits in use, and how its product with tokens is quantized, if it is."""

    kernel_VM: Any
    low: LowPrecision | None


def projection(params: InUse, links: Links) -> Projection:
    """The projection to the vocabulary. A model without ``logits.kernel`` has tied embeddings."""
    if "logits.kernel" in params:
        return Projection(links.use("logits.kernel", params["logits.kernel"]), links.low.get("logits.kernel"))
    kernel_VM = links.use("embedding.tokens", params["embedding.tokens"], "logits")
    return Projection(kernel_VM, links.low.get("embedding.tokens"))


def scores(x_BLM: torch.Tensor, projection: Projection, links: Links) -> torch.Tensor:
    """The logits, BLV, of the projection's input."""
    return without_padding(weight_product(x_BLM, projection.kernel_VM, "logits", projection.low), links)


def without_padding(logits_BLV: torch.Tensor, links: Links) -> torch.Tensor:
    """The logits with those of a padded vocabulary's padding at minus infinity: their probabilities and gradients are zero."""
    if links.entries is None:
        return logits_BLV
    V = logits_BLV.shape[-1]
    first = links.vocab["logits"].index * V
    is_padding_V = torch.arange(first, first + V, device=logits_BLV.device) >= links.entries
    return logits_BLV.masked_fill(is_padding_V, -torch.inf)
