"""The three products with a weight of which operands are quantized.

A product of two quantized operands is computed in float32 from the values of their codes, on every device: the numbers of a
device with narrow products, whose sums are float32 or wider. It differs from the exact sum of K terms by at most K * 2^-24 of the
sum of their absolute values.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.recipe import OPERANDS, Operand, Product
from shardwright.engine_jax.io.dtypes import kept
from shardwright.engine_jax.io.layer_io import LowPrecision
from shardwright.engine_jax.precision.operands import values


def quantized_product(dims: str, x: jax.Array, weight: jax.Array, what: str, low: LowPrecision) -> jax.Array:
    """``jnp.einsum(dims, x, weight)`` and the two products of its backward pass, as a recipe has them.

    ``dims``: those of tokens come first in ``x`` and in the result. Their last one has the blocks of the weight's gradient.
    """
    form = _Form.of(dims)

    @jax.custom_vjp
    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        y = _multiplied("output", form.tokens_first(x, form.inputs), form.outputs_first(weight), low)
        return y.reshape(*x.shape[: form.num_tokens], *form.sizes(weight, form.outputs)).astype(kept(what, x.dtype))

    def backward(kept_arrays: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, weight = kept_arrays
        cotangent = cotangent.astype(kept("cotangent", x.dtype))
        by_outputs = form.tokens_first(cotangent, form.outputs)
        d_x = _multiplied("input_gradient", by_outputs, form.inputs_first(weight), low)
        tokens_last = (form.tokens_last(x, form.inputs), form.tokens_last(cotangent, form.outputs))
        d_weight = _multiplied("weight_gradient", *tokens_last, low, contracted_dims=form.num_tokens)
        sizes = (*form.sizes(weight, form.inputs), *form.sizes(weight, form.outputs))
        in_order = [(form.inputs + form.outputs).index(dim) for dim in form.weight]
        return d_x.reshape(x.shape).astype(x.dtype), d_weight.reshape(sizes).transpose(in_order).astype(weight.dtype)

    product.defvjp(lambda x, weight: (product(x, weight), (x, weight)), backward)
    return product(x, weight)


class _Form(NamedTuple):
    """The dims of a product, a letter each."""

    weight: str
    inputs: str
    outputs: str
    num_tokens: int

    @classmethod
    def of(cls, dims: str) -> _Form:
        """
        >>> _Form.of("BLHE,HEM->BLM")
        _Form(weight='HEM', inputs='HE', outputs='M', num_tokens=2)
        """
        operands, out = dims.split("->")
        x, weight = operands.split(",")
        tokens = [dim for dim in x if dim not in weight]
        inputs, outputs = ("".join(dim for dim in each if dim not in tokens) for each in (x, out))
        assert [*x[: len(tokens)]] == [*out[: len(tokens)]] == tokens, dims
        return cls(weight=weight, inputs=inputs, outputs=outputs, num_tokens=len(tokens))

    def sizes(self, weight: jax.Array, of: str) -> Sequence[int]:
        return [weight.shape[self.weight.index(dim)] for dim in of]

    def tokens_first(self, x: jax.Array, features: str) -> jax.Array:
        """Tokens by features, both merged."""
        return x.reshape(-1, prod(x.shape[self.num_tokens :])) if features else x

    def tokens_last(self, x: jax.Array, features: str) -> jax.Array:
        """Features, merged, by the dims of tokens."""
        tokens = x.shape[: self.num_tokens]
        return jnp.moveaxis(x.reshape(*tokens, -1), -1, 0) if features else x

    def outputs_first(self, weight: jax.Array) -> jax.Array:
        return self._by(weight, self.outputs, self.inputs)

    def inputs_first(self, weight: jax.Array) -> jax.Array:
        return self._by(weight, self.inputs, self.outputs)

    def _by(self, weight: jax.Array, rows: str, columns: str) -> jax.Array:
        in_order = weight.transpose([self.weight.index(dim) for dim in rows + columns])
        return in_order.reshape(prod(self.sizes(weight, rows)), -1)


def _multiplied(name: Product, x: jax.Array, y: jax.Array, low: LowPrecision, *, contracted_dims: int = 1) -> jax.Array:
    """The sums over the last ``contracted_dims`` dims of two operands, in float32."""
    places: list[tuple[Product, Operand]] = [(name, operand) for operand in OPERANDS[name]]
    all_narrow = all(place in low.quantizers for place in places)
    operands = []
    for place, operand in zip(places, (x, y), strict=True):
        quantizer = low.quantizers.get(place)
        if quantizer is None:
            operands.append(operand)
            continue
        narrow = values(operand, quantizer, low.amax_axes.get(place, ()), contracted_dims)
        operands.append(narrow if all_narrow else narrow.astype(operand.dtype))
    x, y = (operand.reshape(operand.shape[0], -1) for operand in operands)
    # All bits of float32: some devices round its operands otherwise.
    precision = lax.Precision.HIGHEST if all_narrow else None
    return lax.dot_general(
        x, y, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
    )
