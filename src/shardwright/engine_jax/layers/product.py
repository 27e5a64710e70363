"""Products of tokens and weights, with the two products of their backward pass defined here."""

from __future__ import annotations

from functools import partial
from types import MappingProxyType

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.layer_io import LowPrecision
from shardwright.engine_jax.precision.coded import Coded
from shardwright.engine_jax.precision.operands import Amaxes
from shardwright.engine_jax.precision.products import quantized_product

NONE_AGREED: Amaxes = MappingProxyType({})


def weight_product(
    dims: str,
    x: jax.Array,
    weight: jax.Array | Coded,
    low: LowPrecision | None = None,
    amaxes: Amaxes = NONE_AGREED,
    dtype: str | None = None,
) -> jax.Array:
    """``jnp.einsum(dims, x, weight)`` of tokens and a weight, in the dtypes of ``core/model/precision.py``, or of operands that are
    quantized as ``low`` says; ``amaxes``: of the input, where several weights multiply it (``input_amaxes``). ``dtype``: the result's own.

    The weight's gradient is computed as tokens times cotangent. JAX itself computes cotangent times tokens and transposes the
    result. XLA on CPU then writes a transposed copy of each cotangent; in our order one transposed copy of the tokens serves
    all weights that multiply them. The cotangent is cast to the tokens' dtype, so that both products have one narrow dtype.
    """
    if low is not None:
        return quantized_product(dims, x, weight, _result_dtype(x, dtype), low, dict(amaxes))
    assert not isinstance(weight, Coded), dims
    return _product(dims, x, weight, _result_dtype(x, dtype))


def wide_product(dims: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same of a weight that is in use in a dtype of its own: of exact operands, in that dtype."""
    return jnp.einsum(dims, x.astype(weight.dtype), weight, precision=jax.lax.Precision.HIGHEST)


def _result_dtype(x: jax.Array, dtype: str | None) -> jnp.dtype:
    return kept_in("product", x.dtype) if dtype is None else jnp.dtype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(dims: str, x: jax.Array, weight: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum(dims, x, weight, preferred_element_type=dtype)


def _forward(dims, x, weight, dtype):
    return _product(dims, x, weight, dtype), (x, weight)


def _backward(
    dims: str, _, residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    operands, out = dims.split("->")
    of_x, of_weight = operands.split(",")
    cotangent = cotangent.astype(kept_in("cotangent", x.dtype))
    return jnp.einsum(f"{out},{of_weight}->{of_x}", cotangent, weight), jnp.einsum(
        f"{of_x},{out}->{of_weight}", x, cotangent
    )


_product.defvjp(_forward, _backward)
