"""The SwiGLU feed-forward layer (arXiv:2002.05202), dense or as shared experts.

B rows, L tokens, M embed, F hidden units.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import Params, Place


def feed_forward(x_BLM: jax.Array, weights: Params, name: str, place: Place) -> jax.Array:
    """What the layer adds to the residual stream, BLM. ``name`` is ``mlp`` or ``shared``, as in the table."""
    x_BLM = place(f"{name}.input", x_BLM)
    gate_BLF = jnp.einsum("BLM,MF->BLF", x_BLM, weights[f"{name}.gate"])
    up_BLF = jnp.einsum("BLM,MF->BLF", x_BLM, weights[f"{name}.up"])
    hidden_BLF = place(f"{name}.hidden", jax.nn.silu(gate_BLF) * up_BLF)
    return place(f"{name}.projected", jnp.einsum("BLF,FM->BLM", hidden_BLF, weights[f"{name}.down"]))
