"""The two ends of a decoder: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import Links, Params, index_of
from shardwright.engine_jax.product import weight_product


def embed(tokens_BL: jax.Array, table_VM: jax.Array, links: Links) -> jax.Array:
    """The row of each token, BLM. Where the vocabulary is cut, each device gives the tokens it has, and zeros.

    ``table_VM``: ``embedding.tokens`` in use.
    """
    ids_BL = links.move("input.tokens", "embedding.ids", tokens_BL)
    if cut := links.vocab.get("embedding", ()):
        V = table_VM.shape[0]
        ids_BL = ids_BL - index_of(cut) * V
        ids_BL = jnp.where(ids_BL < 0, V, ids_BL)
    x_BLM = table_VM.at[ids_BL].get(mode="fill", fill_value=0)
    return links.move("embedding.output", "residual.stream", x_BLM)


def logits(x_BLM: jax.Array, params: Params, table_VM: jax.Array, links: Links) -> jax.Array:
    """Scores of the vocabulary entries, BLV, in float32. A model without ``logits.kernel`` uses its embedding."""
    x_BLM = links.move("residual.stream", "logits.input", x_BLM)
    if "logits.kernel" in params:
        kernel, product = links.use("logits.kernel", params["logits.kernel"]), "BLM,MV->BLV"
    elif links.tied_once:
        kernel, product = table_VM, "BLM,VM->BLV"
    else:
        kernel, product = links.use("embedding.tokens", params["embedding.tokens"], "logits"), "BLM,VM->BLV"
    return weight_product(product, x_BLM, kernel, jnp.float32)
