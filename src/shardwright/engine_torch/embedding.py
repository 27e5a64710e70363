"""The two ends of a decoder: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.engine_torch.layer_io import Links, Params


def embed(tokens_BL: torch.Tensor, params: Params, links: Links) -> torch.Tensor:
    """The row of each token, BLM. Where the vocabulary is cut, each rank gives the tokens it has, and zeros."""
    table_VM = links.use("embedding.tokens", params["embedding.tokens"])
    ids_BL = links.move("input.tokens", "embedding.ids", tokens_BL)
    cut = links.vocab.get("embedding")
    if cut is None or cut.group is None:
        x_BLM = functional.embedding(ids_BL, table_VM)
    else:
        V = table_VM.shape[0]
        own_BL = ids_BL - cut.index * V
        there_BL = (own_BL >= 0) & (own_BL < V)
        x_BLM = functional.embedding(own_BL.clamp(0, V - 1), table_VM) * there_BL[..., None].to(table_VM.dtype)
    return links.move("embedding.output", "residual.stream", x_BLM)


def logits(x_BLM: torch.Tensor, params: Params, links: Links) -> torch.Tensor:
    """Scores of the vocabulary entries, BLV, in float32. A model without ``logits.kernel`` uses its embedding."""
    x_BLM = links.move("residual.stream", "logits.input", x_BLM)
    if "logits.kernel" in params:
        kernel_VM = links.use("logits.kernel", params["logits.kernel"])
    else:
        kernel_VM = links.use("embedding.tokens", params["embedding.tokens"], "logits")
    return functional.linear(x_BLM, kernel_VM).float()
