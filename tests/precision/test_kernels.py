"""Products by each kernel that multiplies codes, or their values in bfloat16, against the values of the codes in float64.

A CPU multiplies FP8 in float32, and has no product of block scales: its stand-in is what JAX's documentation says of it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.core.recipes.kernels import Device, KernelName, product_kernels
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import OPERANDS, Product, Quantizer
from shardwright.engine_jax.experts.grouped_low import quantized_grouped_product
from shardwright.engine_jax.io.layer_io import LowPrecision
from shardwright.engine_jax.precision import kernels
from shardwright.engine_jax.precision.operands import codes_of, values
from tests.matrix import rest
from tests.precision.made import ordinary

H100, B200 = Device(kind="GPU", capability=(9, 0)), Device(kind="GPU", capability=(10, 0))
TPU = Device(kind="TPU")


def documented(lhs, rhs, lhs_scales, rhs_scales, preferred_element_type) -> jax.Array:
    """``jax.nn.scaled_matmul`` as its documentation defines it."""

    def scaled(x: jax.Array, scales: jax.Array) -> jax.Array:
        return x.astype(jnp.float32) * jnp.repeat(scales.astype(jnp.float32), x.shape[-1] // scales.shape[-1], axis=-1)

    return jnp.einsum(
        "BMK,BNK->BMN",
        scaled(lhs, lhs_scales),
        scaled(rhs, rhs_scales),
        precision="highest",
        preferred_element_type=preferred_element_type,
    )


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "FP8", None)
    monkeypatch.setattr(jax.nn, "scaled_matmul", documented)


def kernels_on(recipe: str, device: Device, *, experts: bool = False, **options) -> dict[Product, KernelName]:
    chosen = product_kernels(preset(recipe, **options).quantizers, device, "jax", experts=experts, dtype="float32")
    return {product: one.name for product, one in chosen.items()}


def both(operands: list[jax.Array], kernel: KernelName, of: tuple[Quantizer, ...], dims: int) -> tuple[jax.Array, ...]:
    """A product by a kernel, and the values of both operands."""
    found, exact = [], []
    for x, quantizer in zip(operands, of, strict=True):
        found.append(kernels.rows_of(kernel, codes_of(x, quantizer, None, dims), x.shape, quantizer, dims))
        exact.append(values(x, quantizer, None, dims).reshape(x.shape[0], -1))
    return kernels.multiplied(kernel, *found), *exact


CASES = [
    ("fp8-current", H100, "fp8"),
    ("fp8-row", H100, "fp8"),
    ("fp8-block", H100, "bfloat16"),
    ("mxfp8", H100, "bfloat16"),
    ("fp8-block", B200, "mx"),
    ("mxfp8", B200, "mx"),
    ("fp8-current", TPU, "bfloat16"),
]


@pytest.mark.parametrize(
    ("recipe", "device", "kernel"), [case if number in (0, 2, 5) else rest(*case) for number, case in enumerate(CASES)]
)
def test_a_product_is_that_of_the_values_of_the_codes(
    recipe: str, device: Device, kernel: KernelName, on_a_cpu: None
) -> None:
    """Of the weight's gradient too, whose blocks begin with each row of 48 tokens: those of 32 and of 128 end inside one."""
    del on_a_cpu
    quantizers, chosen = preset(recipe).quantizers, kernels_on(recipe, device)
    assert set(chosen.values()) == {kernel}
    for product in chosen:
        dims = 2 if product == "weight_gradient" else 1
        shapes = [(40, 3, 48), (24, 3, 48)] if dims == 2 else [(40, 160), (24, 160)]
        of = [quantizers[product, operand] for operand in OPERANDS[product]]
        operands = [*map(ordinary, (0, 1), shapes)]
        ours, x, y = (
            np.asarray(one, np.float64)
            for one in jax.jit(both, static_argnums=(1, 2, 3))(operands, kernel, tuple(of), dims)
        )
        # The sum, and a rounding for each scale of a row.
        bound = (x.shape[1] + 2) * 2.0**-24 * (np.abs(x) @ np.abs(y.T))
        assert (np.abs(ours - x @ y.T) <= bound).all(), product


SIZES = (37, 0, 70, 5)


@pytest.mark.parametrize(("recipe", "device"), [("fp8-current", H100), rest("fp8-block", B200), rest("mxfp8", TPU)])
def test_grouped_products_are_those_of_the_emulation(recipe: str, device: Device, on_a_cpu: None) -> None:
    """Rows of no expert come last, and are not a number."""
    del on_a_cpu
    num, quantizers = sum(SIZES), preset(recipe).quantizers
    x, matrices, d = ordinary(0, (num + 16, 96)), ordinary(1, (len(SIZES), 96, 64)), ordinary(2, (num + 16, 64))
    x[num:], d[num:] = np.nan, np.nan

    def all_three(low: LowPrecision) -> list[np.ndarray]:
        def product(x: jax.Array, matrices: jax.Array) -> jax.Array:
            return quantized_grouped_product(x, matrices, jnp.asarray(SIZES), 8, low, {})

        def forward_and_backward(x: jax.Array, matrices: jax.Array, d: jax.Array) -> tuple[jax.Array, ...]:
            y, pull = jax.vjp(product, x, matrices)
            return y, *pull(d)

        return [np.asarray(one) for one in jax.jit(forward_and_backward)(x, matrices, d)]

    kernels = kernels_on(recipe, device, experts=True)
    assert "float32" not in kernels.values()
    ours = all_three(LowPrecision(quantizers=quantizers, kernels=kernels))
    theirs = all_three(LowPrecision(quantizers=quantizers))
    for one, other in zip(ours, theirs, strict=True):
        one, other = (each[:num] if each.ndim == 2 else each for each in (one, other))
        assert np.abs(one - other).mean() < 1e-6 * np.abs(other).mean()


def test_codes_of_e2m1_are_unpacked_in_their_order() -> None:
    """The first of two is in the lower half; a CPU reads them as integers of 4 bits."""
    found = jax.lax.bitcast_convert_type(jnp.array([[0x21, 0x43]], jnp.uint8), jnp.uint4)
    assert np.asarray(found.reshape(1, -1).astype(jnp.int32)).tolist() == [[1, 2, 3, 4]]
