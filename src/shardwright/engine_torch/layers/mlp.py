"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.engine_torch.io.layer_io import Links, Params


def feed_forward(x_BLM: torch.Tensor, weights: Params, name: str, links: Links) -> torch.Tensor:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)
    gate_BLF = functional.linear(x_BLM, weights[f"{name}.gate"])
    hidden_BLF = functional.silu(gate_BLF) * functional.linear(x_BLM, weights[f"{name}.up"])
    return links.move(f"{name}.projected", "residual.stream", functional.linear(hidden_BLF, weights[f"{name}.down"]))
