"""The embedding and the logits: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import Links, LowPrecision, Params, index_of
from shardwright.engine_jax.layers.order import zeros_after
from shardwright.engine_jax.layers.product import weight_product


def embed(tokens_BL: jax.Array, table_VM: jax.Array, links: Links) -> jax.Array:
    """The embedding of each token, BLM, in the residual stream's layout.

    If the vocabulary is sharded, each device looks up the tokens of its own entries and has zeros for the others; the move to
    the residual stream sums them. ``table_VM``: ``embedding.tokens`` in use.
    """
    ids_BL = links.move("input.tokens", "embedding.ids", tokens_BL)
    if axes := links.vocab.get("embedding", ()):
        V = table_VM.shape[0]
        ids_BL = ids_BL - index_of(axes) * V
        ids_BL = jnp.where(ids_BL < 0, V, ids_BL)
    x_BLM = rows_of(table_VM, ids_BL)
    return links.move("embedding.output", "residual.stream", x_BLM)


def rows_of(table_VM: jax.Array, ids_BL: jax.Array) -> jax.Array:
    """The row of each id, BLM; zeros for an id out of bounds."""
    return cast(jax.Array, _rows(table_VM.shape[0], table_VM, ids_BL))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(num: int, table_VM: jax.Array, ids_BL: jax.Array) -> jax.Array:
    del num
    return table_VM.at[ids_BL].get(mode="fill", fill_value=0)


def _rows_backward(num: int, ids_BL: jax.Array, d_BLM: jax.Array) -> tuple[jax.Array, None]:
    # Summed in a wider dtype, because a frequent token adds thousands of cotangents to one row.
    of_sums = jax.ShapeDtypeStruct((num, d_BLM.shape[-1]), computed("gradient", d_BLM.dtype))
    d_BLM, sums_VM = zeros_after(d_BLM, of_sums)
    return sums_VM.at[ids_BL].add(d_BLM.astype(sums_VM.dtype), mode="drop").astype(d_BLM.dtype), None


_rows.defvjp(lambda num, table_VM, ids_BL: (_rows(num, table_VM, ids_BL), ids_BL), _rows_backward)


class Projection(NamedTuple):
    """The weight of the logits in use, the dims of its product with tokens, and how that is quantized, if it is."""

    kernel: Any
    dims: str
    low: LowPrecision | None


def projection(params: Params, tied_VM: jax.Array | None, links: Links) -> Projection:
    """The projection to the vocabulary. A model without ``logits.kernel`` has tied embeddings.

    ``tied_VM``: the embedding, if it was resharded once for both uses; None: it is resharded again for the logits.
    """
    if "logits.kernel" in params:
        low = links.low.get("logits.kernel")
        kernel = links.use("logits.kernel", params["logits.kernel"], factor=None if low is None else low.factor)
        return Projection(kernel, "BLM,MV->BLV", low)
    if tied_VM is None:
        tied_VM = links.use("embedding.tokens", params["embedding.tokens"], "logits")
    return Projection(tied_VM, "BLM,VM->BLV", links.low.get("embedding.tokens"))


def scores(x_BLM: jax.Array, projection: Projection, links: Links) -> jax.Array:
    """The logits, BLV, of the projection's input."""
    kernel, dims, low = projection
    return without_padding(weight_product(dims, x_BLM, kernel, "logits", low), links)


def without_padding(logits_BLV: jax.Array, links: Links) -> jax.Array:
    """The logits with those of a padded vocabulary's padding at minus infinity: their probabilities and gradients are zero."""
    if links.entries is None:
        return logits_BLV
    V = logits_BLV.shape[-1]
    entries_V = jax.lax.broadcasted_iota(jnp.int32, (1, 1, V), 2) + index_of(links.vocab["logits"]) * V
    return jnp.where(entries_V < links.entries, logits_BLV, -jnp.inf)
