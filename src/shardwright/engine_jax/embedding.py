"""The two ends of a decoder: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary; C pieces of the vocabulary of W entries each.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from shardwright.engine_jax.layer_io import Params, Pieces, Place, Use


def embed(tokens_BL: jax.Array, params: Params, use: Use, place: Place, vocab: Pieces) -> jax.Array:
    """The row of each token, BLM."""
    table_VM = use("embedding.tokens", params["embedding.tokens"])
    tokens_BL = place("input.tokens", tokens_BL)
    x_BLM = _rows(table_VM, tokens_BL) if vocab.num == 1 else _rows_by_piece(table_VM, tokens_BL, vocab.num)
    return place("residual.stream", place("embedding.output", x_BLM))


def logits(x_BLM: jax.Array, params: Params, use: Use, place: Place) -> jax.Array:
    """Scores of every vocabulary entry, BLV, in float32. A model without ``logits.kernel`` uses its embedding."""
    x_BLM = place("logits.input", x_BLM)
    if "logits.kernel" in params:
        kernel, product = use("logits.kernel", params["logits.kernel"]), "BLM,MV->BLV"
    else:
        kernel, product = use("embedding.tokens", params["embedding.tokens"]), "BLM,VM->BLV"
    return place("logits.scores", jnp.einsum(product, x_BLM, kernel, preferred_element_type=jnp.float32))


def _rows(table_VM: jax.Array, tokens_BL: jax.Array) -> jax.Array:
    return table_VM.at[tokens_BL].get(mode="fill", fill_value=0)


def _rows_by_piece(table_VM: jax.Array, tokens_BL: jax.Array, num: int) -> jax.Array:
    """Each piece of the vocabulary gives the tokens it has, and zeros; the sum has one term that is not zero.

    Left to itself, XLA looks up a table that is cut by moving tokens and results between rows' owners.
    """
    table_CWM = table_VM.reshape(num, -1, table_VM.shape[1])
    W = table_CWM.shape[1]
    within_CBL = tokens_BL[None] - (W * jnp.arange(num))[:, None, None]
    within_CBL = jnp.where(within_CBL < 0, W, within_CBL)
    return jnp.sum(jax.vmap(_rows)(table_CWM, within_CBL), axis=0)
