"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.engine_torch.io.layer_io import Links, Params
from shardwright.engine_torch.layers.product import weight_product


def feed_forward(x_BLM: torch.Tensor, weights: Params, name: str, links: Links) -> torch.Tensor:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)

    def product(x: torch.Tensor, of: str) -> torch.Tensor:
        return weight_product(x, weights[f"{name}.{of}"], low=links.low.get(f"{name}.{of}"))

    hidden_BLF = functional.silu(product(x_BLM, "gate")) * product(x_BLM, "up")
    return links.move(f"{name}.projected", "residual.stream", product(hidden_BLF, "down"))
