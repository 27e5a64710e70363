"""The three products with a weight under each preset, of both engines, against products of NumPy's quantized operands in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from shardwright.core.recipes.hadamard import transformed
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.engine_jax.io.layer_io import LowPrecision as JaxLow
from shardwright.engine_jax.layers.product import weight_product as jax_product
from shardwright.engine_torch.io.layer_io import NO_SITE
from shardwright.engine_torch.io.layer_io import LowPrecision as TorchLow
from shardwright.engine_torch.layers.product import weight_product as torch_product
from shardwright.engine_torch.precision.arrays import ARRAYS
from shardwright.engine_torch.precision.random_bits import random_numbers, signs
from tests.precision import oracle
from tests.precision.made import ordinary

B, L, K, H, D = 2, 48, 160, 4, 24
"""Rows, tokens of a row, inputs, heads and their outputs: rows of 48 tokens end inside blocks of 32, and 160 inputs inside those of 128."""

Quantizers = dict[tuple[Product, Operand], Quantizer]


def made() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, a weight and a cotangent."""
    return ordinary(0, (B, L, K)), ordinary(1, (K, H * D)), ordinary(2, (B, L, H * D))


def operand(x: np.ndarray, quantizers: Quantizers, product: Product, of: Operand) -> np.ndarray:
    """The values of a matrix, other dim by contracted dim, in float64."""
    quantizer = quantizers.get((product, of))
    if quantizer is None:
        return x.astype(np.float64)
    if quantizer.hadamard is not None:
        x = np.asarray(transformed(torch.from_numpy(x.copy()), signs(NO_SITE, 16, torch.device("cpu")), ARRAYS))
    codes, scales, of_tensor = oracle.quantized(x, quantizer, random_of(x, (product, of), quantizers))
    if quantizer.scale.dtype == "float8_e8m0fnu":
        scales = np.exp2(scales.astype(np.float64) - 127)
    values = codes.view(getattr(ml_dtypes, quantizer.dtype)).astype(np.float64)
    for place, elements in oracle.blocks_of(x.shape, quantizer):
        values[elements] *= scales[place]
    return values * (1 if of_tensor is None else np.float64(of_tensor))


def random_of(x: np.ndarray, place: tuple[Product, Operand], quantizers: Quantizers) -> np.ndarray | None:
    """Those of PyTorch's engine, which ``test_random.py`` compares with others."""
    found = random_numbers(place, TorchLow(quantizers=quantizers), torch.from_numpy(x), 0)
    return None if found is None else found.numpy()


def tokens_last(x: np.ndarray, quantizers: Quantizers, of: Operand) -> np.ndarray:
    """The operand of the weight's gradient: blocks over tokens begin with each row; a scale of all tokens is of all rows, and
    so it is where rows are entire blocks."""
    quantizer = quantizers.get(("weight_gradient", of))
    if quantizer is None or quantizer.block.contracted is None or L % quantizer.block.contracted == 0:
        return operand(x.reshape(B * L, -1).T, quantizers, "weight_gradient", of)
    return np.concatenate([operand(row.T, quantizers, "weight_gradient", of) for row in x], axis=1)


def expected(quantizers: Quantizers) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """Output, input gradient and weight gradient, the sums of absolute values of each, and the number of terms."""
    x, w, g = made()
    flat_x, flat_g = x.reshape(B * L, K), g.reshape(B * L, H * D)
    pairs = [
        (operand(flat_x, quantizers, "output", "input"), operand(w.T, quantizers, "output", "weight")),
        (
            operand(flat_g, quantizers, "input_gradient", "output_gradient"),
            operand(w, quantizers, "input_gradient", "weight"),
        ),
        (tokens_last(x, quantizers, "input"), tokens_last(g, quantizers, "output_gradient")),
    ]
    return [(a @ b.T, np.abs(a) @ np.abs(b.T), a.shape[1]) for a, b in pairs]


def on_jax(quantizers: Quantizers) -> list[np.ndarray]:
    x, w, g = made()
    low = JaxLow(quantizers=quantizers)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax_product("BLK,KHD->BLHD", x, w, low=low)

    def all_three(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        y, pull = jax.vjp(product, x, w)
        return y, *pull(g)

    return [np.asarray(one) for one in jax.jit(all_three)(x, w.reshape(K, H, D), g.reshape(B, L, H, D))]


def on_torch(quantizers: Quantizers) -> list[np.ndarray]:
    x, w, g = (torch.from_numpy(one) for one in made())
    x.requires_grad_()
    weight_OI = w.T.contiguous().requires_grad_()
    y = torch_product(x, weight_OI, low=TorchLow(quantizers=quantizers))
    y.backward(g)
    assert x.grad is not None
    assert weight_OI.grad is not None
    return [y.detach().numpy(), x.grad.numpy(), weight_OI.grad.numpy().T]


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "fp8-delayed"])
def test_products_are_those_of_the_values_of_the_codes(name: str) -> None:
    quantizers: Quantizers = dict(PRESETS[name]().quantizers)
    for engine, ours in (("JAX", on_jax(quantizers)), ("PyTorch", on_torch(quantizers))):
        for product, found, (exact, absolute, terms) in zip(
            ("output", "input gradient", "weight gradient"), ours, expected(quantizers), strict=True
        ):
            error = np.abs(found.reshape(exact.shape) - exact)
            bound = terms * 2.0**-24 * absolute
            assert (error <= bound).all(), f"{engine}, {product}: {(error / np.maximum(bound, 1e-300)).max():.2f}"


def test_an_operand_without_a_quantizer_has_the_dtype_of_the_computation() -> None:
    """And the product multiplies in it: the other operand's values are rounded to it too."""
    quantizers = dict(PRESETS["fp8-current"]().quantizers)
    del quantizers["output", "input"]
    x, w, _ = made()
    x16, w16 = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16)
    ours = jax_product("BLK,KM->BLM", x16, w16, low=JaxLow(quantizers=quantizers))
    values = operand(np.asarray(w16, np.float32).T, quantizers, "output", "weight").astype(ml_dtypes.bfloat16)
    exact = np.asarray(x16, np.float64).reshape(B * L, K) @ values.astype(np.float64).T
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(ours, np.float64).reshape(exact.shape), exact, rtol=2**-7, atol=1e-3)
    theirs = torch_product(
        torch.from_numpy(x).bfloat16(),
        torch.from_numpy(w.T.copy()).bfloat16(),
        low=TorchLow(quantizers=quantizers),
    )
    assert theirs.dtype == torch.bfloat16
    np.testing.assert_allclose(theirs.double().numpy().reshape(exact.shape), exact, rtol=2**-7, atol=1e-3)
