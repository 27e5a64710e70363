"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units of this device.
"""

from __future__ import annotations

import jax

from shardwright.engine_jax.layer_io import Links, Params
from shardwright.engine_jax.product import weight_product


def feed_forward(x_BLM: jax.Array, weights: Params, name: str, links: Links) -> jax.Array:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = links.move("residual.stream", f"{name}.input", x_BLM)
    gate_BLF = weight_product("BLM,MF->BLF", x_BLM, weights[f"{name}.gate"])
    up_BLF = weight_product("BLM,MF->BLF", x_BLM, weights[f"{name}.up"])
    hidden_BLF = jax.nn.silu(gate_BLF) * up_BLF
    out_BLM = weight_product("BLF,FM->BLM", hidden_BLF, weights[f"{name}.down"])
    return links.move(f"{name}.projected", "residual.stream", out_BLM)
