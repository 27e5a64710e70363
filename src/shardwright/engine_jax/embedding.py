"""The two ends of a decoder: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import Params, Place, Use


def embed(tokens_BL: jax.Array, params: Params, use: Use, place: Place) -> jax.Array:
    """The row of each token, BLM."""
    table_VM = use("embedding.tokens", params["embedding.tokens"])
    x_BLM = table_VM.at[place("input.tokens", tokens_BL)].get(mode="clip")
    return place("residual.stream", place("embedding.output", x_BLM))


def logits(x_BLM: jax.Array, params: Params, use: Use, place: Place) -> jax.Array:
    """Scores of every vocabulary entry, BLV, in float32. A model without ``logits.kernel`` uses its embedding."""
    x_BLM = place("logits.input", x_BLM)
    if "logits.kernel" in params:
        kernel, product = use("logits.kernel", params["logits.kernel"]), "BLM,MV->BLV"
    else:
        kernel, product = use("embedding.tokens", params["embedding.tokens"]), "BLM,VM->BLV"
    return place("logits.scores", jnp.einsum(product, x_BLM, kernel, preferred_element_type=jnp.float32))
