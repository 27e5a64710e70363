"""Products of tokens and weights against JAX's own, forward and backward, and which of them are saved by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.engine_jax.layers.product import weight_product

SIZES = {"B": 2, "L": 3, "M": 4, "H": 5, "D": 6, "V": 7}
RNG = np.random.default_rng(0)


def of(dims: str) -> jax.Array:
    return jnp.asarray(RNG.normal(size=[SIZES[dim] for dim in dims]), jnp.float32)


@pytest.mark.parametrize("dims", ["BLM,MHD->BLHD", "BLHD,HDM->BLM", "BLM,VM->BLV"])
def test_it_is_the_product_of_jax(dims: str) -> None:
    operands, out = dims.split("->")
    x, weight, cotangent = (of(each) for each in (*operands.split(","), out))
    ours, our_cotangents = jax.vjp(lambda x, weight: weight_product(dims, x, weight), x, weight)
    theirs, their_cotangents = jax.vjp(lambda x, weight: jnp.einsum(dims, x, weight), x, weight)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    for our, their in zip(our_cotangents(cotangent), their_cotangents(cotangent), strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-5, atol=1e-6)


def test_a_wide_product_has_narrow_cotangents() -> None:
    x, weight = of("BLM").astype(jnp.bfloat16), of("MV").astype(jnp.bfloat16)
    out, cotangents = jax.vjp(lambda x, weight: weight_product("BLM,MV->BLV", x, weight, dtype="float32"), x, weight)
    assert out.dtype == jnp.float32
    assert [cotangent.dtype for cotangent in cotangents(out)] == [jnp.bfloat16, jnp.bfloat16]
