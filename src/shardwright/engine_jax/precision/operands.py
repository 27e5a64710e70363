"""The operands of a product as they are after quantization, and the axes over which devices agree on an amax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formula import Quantized, Shares, amax_of, dequantize, quantize, shared_by
from shardwright.core.recipes.hadamard import transformed
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.engine_jax.io.layer_io import LowPrecision, Site
from shardwright.engine_jax.io.scopes import of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.random_bits import signs

Amaxes = Mapping[tuple[str, ...], jax.Array]
"""Amaxes on which devices have agreed, int32, by ``LowPrecision.same_amax``."""

INPUT: tuple[Product, Operand] = ("output", "input")


def quantized(x: jax.Array, quantizer: Quantizer, axes: tuple[str, ...] = (), contracted_dims: int = 1) -> Quantized:
    """Codes and scales of a device's shard of an operand, ``[..., other, *contracted]``.

    ``axes``: those over which the devices hold parts of what shares a scale.
    """

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        return lax.pmax(amax, axes) if axes and of == shared_by(quantizer) else amax

    return quantize(x, quantizer, ARRAYS, contracted_dims=contracted_dims, agree=agree)


def codes_of(
    x: jax.Array,
    quantizer: Quantizer,
    agreed: jax.Array | None = None,
    contracted_dims: int = 1,
    factor: jax.Array | None = None,
    random: jax.Array | None = None,
) -> Quantized:
    """Codes and scales of an operand.

    ``agreed``: the amaxes of all devices that hold parts of what shares a scale; None: this one has all. ``factor``: of each tensor
    with a delayed amax. ``random``: the numbers of stochastic rounding.
    """

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        return amax if agreed is None or of != shared_by(quantizer) else agreed.reshape(amax.shape)

    return quantize(x, quantizer, ARRAYS, contracted_dims=contracted_dims, agree=agree, factor=factor, random=random)


def values(
    x: jax.Array,
    quantizer: Quantizer,
    agreed: jax.Array | None = None,
    contracted_dims: int = 1,
    factor: jax.Array | None = None,
    random: jax.Array | None = None,
) -> jax.Array:
    """The values of the operand's codes, float32."""
    codes = codes_of(x, quantizer, agreed, contracted_dims, factor, random)
    result = dequantize(codes, x.shape, quantizer, ARRAYS, contracted_dims=contracted_dims)
    return jnp.asarray(result, jnp.float32)


def turned(x: jax.Array, quantizer: Quantizer, site: Site) -> jax.Array:
    """An operand after its random Hadamard transform along the last dim, float32; as it is where it has none."""
    return x if quantizer.hadamard is None else transformed(x, signs(site, quantizer.hadamard), ARRAYS)


def agreed_amax(
    x: jax.Array, low: LowPrecision, place: tuple[Product, Operand], contracted_dims: int = 1
) -> jax.Array | None:
    """The amaxes of an operand on which devices agree; None where none has to."""
    axes, quantizer = low.amax_axes.get(place, ()), low.quantizers.get(place)
    if quantizer is None or not axes or quantizer.amax == "delayed":
        return None
    with of_tensor(low.name):
        return lax.pmax(amax_of(x, quantizer, ARRAYS, contracted_dims=contracted_dims), axes)


def input_amaxes(x: jax.Array, weights: Iterable[LowPrecision | None]) -> Amaxes:
    """The agreed amaxes of an input, whose features are the last dim, that several weights multiply: each once."""
    x = x.reshape(-1, x.shape[-1])
    found: dict[tuple[str, ...], jax.Array] = {}
    for low in weights:
        if low is not None and (key := low.same_amax.get(INPUT)) is not None and key not in found:
            agreed = agreed_amax(x, low, INPUT)
            if agreed is not None:
                found[key] = agreed
    return found
