"""The embedding and the logits: tokens to the residual stream, and the stream to logits.

B rows, L tokens, M embed, V vocabulary entries of this device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp

from shardwright.core.program.primitives import Cap, Scale
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import LowPrecision, index_of
from shardwright.engine_jax.layers.elementwise import capped
from shardwright.engine_jax.layers.order import zeros_after
from shardwright.engine_jax.layers.product import weight_product


def embed(ids_BL: jax.Array, table_VM: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The embedding of each token, BLM.

    ``axes``: those that shard the vocabulary. Each device looks up the tokens of its own entries and has zeros for the others; their sum is
    the embedding.
    """
    if axes:
        V = table_VM.shape[0]
        ids_BL = ids_BL - index_of(axes) * V
        ids_BL = jnp.where(ids_BL < 0, V, ids_BL)
    return rows_of(table_VM, ids_BL)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How logits are made of the last layer's output: the dims of its product with a weight, and how that is quantized, if it is; what is
    done ``on_each`` of them; the ``axes`` that shard the vocabulary; and, of one that is padded in memory, the number of ``entries``."""

    dims: str
    dtype: str | None = None
    low: LowPrecision | None = None
    on_each: tuple[Cap | Scale, ...] = ()
    axes: tuple[str, ...] = ()
    entries: int | None = None


def scores(x_BLM: jax.Array, weight: Any, scoring: Scoring) -> jax.Array:
    """The logits, BLV. ``weight``: in use."""
    logits_BLV = weight_product(scoring.dims, x_BLM, weight, scoring.low, dtype=scoring.dtype)
    for step in scoring.on_each:
        logits_BLV = logits_BLV * step.factor if isinstance(step, Scale) else capped(logits_BLV, step.limit)
    return without_padding(logits_BLV, scoring)


def without_padding(logits_BLV: jax.Array, scoring: Scoring) -> jax.Array:
    """The logits with those of a padded vocabulary's padding at minus infinity: their probabilities and gradients are zero."""
    if scoring.entries is None:
        return logits_BLV
    V = logits_BLV.shape[-1]
    entries_V = jax.lax.broadcasted_iota(jnp.int32, (1, 1, V), 2) + index_of(scoring.axes) * V
    return jnp.where(entries_V < scoring.entries, logits_BLV, -jnp.inf)
