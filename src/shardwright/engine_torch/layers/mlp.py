"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this rank.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.engine_torch.io.layer_io import InUse, Links
from shardwright.engine_torch.layers.product import NONE_AGREED, weight_product
from shardwright.engine_torch.precision.operands import Amaxes, input_amaxes


def feed_forward(x_BLM: torch.Tensor, weights: InUse, name: str, links: Links) -> torch.Tensor:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)

    amaxes = input_amaxes([x_BLM], (links.low.get(f"{name}.{of}") for of in ("gate", "up")))

    def product(x: torch.Tensor, of: str, amaxes: Amaxes = NONE_AGREED) -> torch.Tensor:
        return weight_product(x, weights[f"{name}.{of}"], low=links.low.get(f"{name}.{of}"), amaxes=amaxes)

    hidden_BLF = functional.silu(product(x_BLM, "gate", amaxes)) * product(x_BLM, "up", amaxes)
    return links.move(f"{name}.projected", "residual.stream", product(hidden_BLF, "down"))
