"""The three products with a weight of which operands are quantized.

A product of two quantized operands is computed by the kernel that the core chooses for the device (``core/recipes/kernels.py``).
``float32`` multiplies the values of the codes: it differs from the exact sum of K terms by at most K * 2^-24 of the sum of their
absolute values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.core.recipes.recipe import OPERANDS, Operand, Product
from shardwright.engine_jax.io.dtypes import kept
from shardwright.engine_jax.io.layer_io import LowPrecision, Site
from shardwright.engine_jax.io.scopes import of_tensor
from shardwright.engine_jax.precision.coded import Coded, Codes, carrier_of
from shardwright.engine_jax.precision.delayed import amax_of_all, amaxes_of_step
from shardwright.engine_jax.precision.kernels import Rows, multiplied, product_of, rows_of
from shardwright.engine_jax.precision.operands import Amaxes, agreed_amax, codes_of, turned, values
from shardwright.engine_jax.precision.random_bits import random_numbers


def quantized_product(
    dims: str, x: jax.Array, weight: jax.Array | Coded, dtype: jnp.dtype, low: LowPrecision, amaxes: Amaxes
) -> jax.Array:
    """``jnp.einsum(dims, x, weight)`` and the two products of its backward pass, as a recipe has them.

    ``dims``: those of tokens come first in ``x`` and in the result. Their last one has the blocks of the weight's gradient.
    ``dtype``: of the result. ``amaxes``: those of the input that are agreed on already.
    """
    form, shape, weight_dtype = _Form.of(dims), weight.shape, weight.dtype
    carrier = carrier_of(weight)

    def forward(x: jax.Array, weight: jax.Array | Coded, amaxes: Amaxes, site: Site) -> tuple[jax.Array, Amaxes]:
        y, amaxes = _multiplied("output", form.tokens_first(x), form.outputs_first(weight), low, amaxes, site)
        y = y.reshape(*x.shape[: form.num_tokens], *form.sizes(shape, form.outputs)).astype(dtype)
        return y, amaxes

    @jax.custom_vjp
    def product(x: jax.Array, carrier: jax.Array, weight: jax.Array | Coded, amaxes: Amaxes, site: Site) -> jax.Array:
        del carrier
        return forward(x, weight, amaxes, site)[0]

    def saving(x: jax.Array, carrier: jax.Array, weight: jax.Array | Coded, amaxes: Amaxes, site: Site):
        del carrier
        y, amaxes = forward(x, weight, amaxes, site)
        return y, (x, weight.for_backward() if isinstance(weight, Coded) else weight, amaxes, site)

    def backward(saved: tuple[jax.Array, jax.Array | Coded, Amaxes, Site], cotangent: jax.Array):
        x, weight, amaxes, site = saved
        cotangent = cotangent.astype(kept("cotangent", x.dtype))
        by_outputs = form.tokens_first(cotangent)
        d_x, amaxes = _multiplied("input_gradient", by_outputs, form.inputs_first(weight), low, amaxes, site)
        tokens_last = (form.tokens_last(x), form.tokens_last(cotangent))
        d_weight, _ = _multiplied("weight_gradient", *tokens_last, low, amaxes, site, contracted_dims=form.num_tokens)
        sizes = (*form.sizes(shape, form.inputs), *form.sizes(shape, form.outputs))
        in_order = [(form.inputs + form.outputs).index(dim) for dim in form.weight]
        d_weight = d_weight.reshape(sizes).transpose(in_order).astype(weight_dtype)
        own: dict[Operand, jax.Array] = {"input": x, "output_gradient": cotangent}
        if not isinstance(weight, Coded):
            own["weight"] = weight
        d_site = amaxes_of_step(low, site, {of: partial(amax_of_all, array) for of, array in own.items()})
        return d_x.reshape(x.shape).astype(x.dtype), d_weight, None, None, d_site

    product.defvjp(saving, backward)
    return product(x, carrier, jax.lax.stop_gradient(weight), amaxes, low.own_site)


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

    def sizes(self, shape: Sequence[int], of: str) -> Sequence[int]:
        return [shape[self.weight.index(dim)] for dim in of]

    def tokens_first(self, x: jax.Array) -> jax.Array:
        """Tokens by features, both merged."""
        return x.reshape(-1, prod(x.shape[self.num_tokens :]))

    def tokens_last(self, x: jax.Array) -> jax.Array:
        """Features, merged, by the dims of tokens."""
        return jnp.moveaxis(x.reshape(*x.shape[: self.num_tokens], -1), -1, 0)

    def outputs_first(self, weight: jax.Array | Coded) -> jax.Array | Codes:
        return self._by(weight.operand("output") if isinstance(weight, Coded) else weight, self.outputs, self.inputs)

    def inputs_first(self, weight: jax.Array | Coded) -> jax.Array | Codes:
        operand = weight.operand("input_gradient") if isinstance(weight, Coded) else weight
        return self._by(operand, self.inputs, self.outputs)

    def _by(self, weight: jax.Array | Codes, rows: str, columns: str) -> jax.Array | Codes:
        if isinstance(weight, Codes):
            return weight
        in_order = weight.transpose([self.weight.index(dim) for dim in rows + columns])
        return in_order.reshape(prod(self.sizes(weight.shape, rows)), -1)


def _multiplied(
    name: Product,
    x: jax.Array,
    y: jax.Array | Codes,
    low: LowPrecision,
    amaxes: Amaxes,
    site: Site,
    *,
    contracted_dims: int = 1,
) -> tuple[jax.Array, Amaxes]:
    """The sums over the last ``contracted_dims`` dims of two operands, in float32; and all amaxes that are agreed on now."""
    places: list[tuple[Product, Operand]] = [(name, operand) for operand in OPERANDS[name]]
    all_narrow = all(place in low.quantizers for place in places)
    kernel = low.kernels.get(name, "float32") if not isinstance(y, Codes) else y.kernel(low.kernels.get(name))
    operands: list[jax.Array] = []
    rows: list[Rows] = []
    for place, operand in zip(places, (x, y), strict=True):
        quantizer = low.quantizers.get(place)
        if isinstance(operand, Codes):
            if kernel != "float32":
                rows.append(operand.rows(kernel))
            else:
                operands.append(operand.values() if all_narrow else operand.values().astype(x.dtype))
            continue
        if quantizer is None:
            operands.append(operand)
            continue
        dtype, operand = operand.dtype, turned(operand, quantizer, site)
        key = low.same_amax.get(place, place)
        agreed = amaxes[key] if key in amaxes else agreed_amax(operand, low, place, contracted_dims)
        amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
        factor = site.factors[low.delayed[place]] if place in low.delayed else None
        random = random_numbers(place, low, site, operand.shape)
        if kernel != "float32":
            codes = codes_of(operand, quantizer, agreed, contracted_dims, factor, random)
            rows.append(rows_of(kernel, codes, operand.shape, quantizer, contracted_dims))
            continue
        narrow = values(operand, quantizer, agreed, contracted_dims, factor, random)
        operands.append(narrow if all_narrow else narrow.astype(dtype))
    with of_tensor(low.name):
        if rows:
            return multiplied(kernel, *rows), amaxes
        x, y = (operand.reshape(operand.shape[0], -1) for operand in operands)
        return product_of(x, y, kernel if all_narrow else None, dim=1), amaxes
