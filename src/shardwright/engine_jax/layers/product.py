"""Products of tokens and weights, with the two products of their backward pass written out."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardwright.engine_jax.io.dtypes import kept as kept_in

PRODUCT = "weight_product"
"""What the products are called where it is chosen what to keep for the backward pass."""


def weight_product(dims: str, x: jax.Array, weight: jax.Array, what: str = "product") -> jax.Array:
    """``jnp.einsum(dims, x, weight)`` of tokens and a weight, in the dtypes of that row of ``core/model/precision.py``.

    The weight's gradient is asked for as tokens by slopes. Left to JAX it is slopes by tokens, turned round, and XLA
    on CPU then writes a transposed copy of each slope, where one of the tokens does for all weights that meet them.
    The slope is taken in the dtype of the tokens, so that both products are of one narrow type.
    """
    return checkpoint_name(_product(dims, x, weight, what), PRODUCT)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(dims: str, x: jax.Array, weight: jax.Array, what: str) -> jax.Array:
    return jnp.einsum(dims, x, weight, preferred_element_type=kept_in(what, x.dtype))


def _forward(dims, x, weight, what):
    return _product(dims, x, weight, what), (x, weight)


def _backward(dims: str, _, kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = kept
    operands, out = dims.split("->")
    of_x, of_weight = operands.split(",")
    cotangent = cotangent.astype(kept_in("cotangent", x.dtype))
    return jnp.einsum(f"{out},{of_weight}->{of_x}", cotangent, weight), jnp.einsum(
        f"{of_x},{out}->{of_weight}", x, cotangent
    )


_product.defvjp(_forward, _backward)
