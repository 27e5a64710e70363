"""The backward pass makes zeros when they are needed, and the gradient of the logits' weight first. Numbers stay as they are."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.engine_jax.layers.embedding import rows_of
from shardwright.engine_jax.layers.order import weight_first, zeros_after

ROWS = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
IDS = jnp.array([[0, 2, 2]])


def barriers(function: Callable[..., object], *arguments: jax.Array) -> list[str]:
    """The types of the operands of each barrier of a function."""
    lowered = jax.jit(function).lower(*arguments).as_text()
    return re.findall(r"stablehlo\.optimization_barrier .* : (.*)", lowered)


def test_zeros_are_made_of_scalars_behind_the_cotangent() -> None:
    like = {"a": jax.ShapeDtypeStruct((2, 5), jnp.bfloat16), "b": [jax.ShapeDtypeStruct((), jnp.float32)]}
    cotangent, zeros = zeros_after(ROWS, like)
    np.testing.assert_array_equal(cotangent, ROWS)
    assert jax.tree.map(lambda one: (one.shape, one.dtype, bool(jnp.all(one == 0))), zeros) == {
        "a": ((2, 5), jnp.bfloat16, True),
        "b": [((), jnp.float32, True)],
    }
    assert barriers(lambda x: zeros_after(x, like), ROWS) == ["tensor<4x3xf32>, tensor<bf16>, tensor<f32>"]


def test_rows_are_summed_in_such_zeros() -> None:
    def gradient(table: jax.Array) -> jax.Array:
        return jax.grad(lambda one: jnp.sum(rows_of(one, IDS) * 2))(table)

    np.testing.assert_array_equal(gradient(ROWS)[:, 0], [2, 0, 4, 0])
    assert barriers(gradient, ROWS) == ["tensor<1x3x3xf32>, tensor<f32>"]


def test_a_weight_s_gradient_is_there_before_the_backward_pass_goes_on() -> None:
    def gradients(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(lambda x, weight: jnp.sum(jnp.matmul(*weight_first(x, weight))), argnums=(0, 1))(x, weight)

    weight = ROWS.T
    plain = jax.grad(lambda x, weight: jnp.sum(x @ weight), argnums=(0, 1))(ROWS, weight)
    for ours, theirs in zip(gradients(ROWS, weight), plain, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert barriers(gradients, ROWS, weight) == ["tensor<4x3xf32>, tensor<3x4xf32>"]
