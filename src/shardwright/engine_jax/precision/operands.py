"""The operands of a product as they are after quantization, and the axes over which devices agree on an amax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formula import Quantized, Shares, dequantize, quantize, shared_by
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_jax.precision.arrays import ARRAYS


def quantized(x: jax.Array, quantizer: Quantizer, axes: tuple[str, ...] = (), contracted_dims: int = 1) -> Quantized:
    """Codes and scales of a device's shard of an operand, ``[..., other, *contracted]``.

    ``axes``: those over which the devices hold parts of what shares a scale.
    """

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        return lax.pmax(amax, axes) if axes and of == shared_by(quantizer) else amax

    return quantize(x, quantizer, ARRAYS, contracted_dims=contracted_dims, agree=agree)


def values(x: jax.Array, quantizer: Quantizer, axes: tuple[str, ...] = (), contracted_dims: int = 1) -> jax.Array:
    """The values of the operand's codes, float32: what a product of narrow operands multiplies."""
    codes = quantized(x, quantizer, axes, contracted_dims)
    result = dequantize(codes, x.shape, quantizer, ARRAYS, contracted_dims=contracted_dims)
    return jnp.asarray(result, jnp.float32)
