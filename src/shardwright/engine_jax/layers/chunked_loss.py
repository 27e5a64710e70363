"""The loss over the vocabulary with the logits of one chunk of a device's tokens at a time: no array has those of all.

A chunk is a run of the device's tokens, row after row: neither rows nor the length must be divisible, only their product, and
nothing is sent. The gradients are made in the forward pass, while a chunk's logits are there, so that nothing is computed twice: the
loss is a sum over tokens, and the backward pass multiplies its gradients by one number. The weight's gradient is summed over the
chunks in float32 and rounded once, as the gradient of all tokens is.

B rows, L tokens, M embed, V vocabulary entries of this device; C chunks, each one row of the tokens of a chunk.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.dtypes import kept as kept_in
from shardwright.engine_jax.io.scopes import of_phase
from shardwright.engine_jax.layers.embedding import Scoring, scores
from shardwright.engine_jax.layers.loss import summed_cross_entropy


class _Chunks(NamedTuple):
    """The projection's input, BLM, and of each token its target and whether it counts, BL; of all chunks with C as the first dim."""

    x: jax.Array
    targets: jax.Array
    valid: jax.Array


def chunked_cross_entropy(
    x_BLM: jax.Array, weight: jax.Array, targets_BL: jax.Array, valid_BL: jax.Array, scoring: Scoring, num_chunks: int
) -> jax.Array:
    """The sum over the valid tokens of minus the log-probability of the target.

    ``x_BLM``: what the ``weight`` in use is multiplied with, in the layout of the logits. The product is not quantized."""
    assert scoring.low is None, scoring.low
    B, L, M = x_BLM.shape
    chunked = (num_chunks, 1, B * L // num_chunks)
    chunks = _Chunks(x_BLM.reshape(*chunked, M), targets_BL.reshape(chunked), valid_BL.reshape(chunked))
    return _summed(scoring, weight, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(scoring: Scoring, kernel: jax.Array, chunks: _Chunks) -> jax.Array:
    def add(total: jax.Array, chunk: _Chunks) -> tuple[jax.Array, None]:
        return total + _loss(scoring, scores(chunk.x, kernel, scoring), chunk), None

    return jax.lax.scan(add, jnp.zeros((), jnp.float32), chunks)[0]


def _forward(scoring, kernel, chunks):
    of_x, of_kernel, out = _names(scoring.dims)

    def of_chunk(chunk: _Chunks) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The loss, and the gradients of the weight and of the input."""
        scores_BLV = scores(chunk.x, kernel, scoring)
        loss, cotangent_BLV = jax.value_and_grad(_loss, argnums=1)(scoring, scores_BLV, chunk)
        with of_phase("backward"):
            cotangent_BLV = cotangent_BLV.astype(kept_in("cotangent", chunk.x.dtype))
            wide = computed("gradient", kernel.dtype)
            gradient = jnp.einsum(f"{of_x},{out}->{of_kernel}", chunk.x, cotangent_BLV, preferred_element_type=wide)
            return loss, gradient, jnp.einsum(f"{out},{of_kernel}->{of_x}", cotangent_BLV, kernel)

    def add(sums: tuple[jax.Array, jax.Array], chunk: _Chunks) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        loss, gradient, cotangent_BLM = of_chunk(chunk)
        return (sums[0] + loss, sums[1] + gradient), cotangent_BLM

    # The sums begin with the first chunk and not with zeros, which compilers join with zeros of the embedding's gradient: these
    # would be held from here to the end of the backward pass.
    first, rest = jax.tree.map(lambda array: array[0], chunks), jax.tree.map(lambda array: array[1:], chunks)
    loss, gradient, cotangent_BLM = of_chunk(first)
    (loss, gradient), cotangent_CBLM = jax.lax.scan(add, (loss, gradient), rest)
    with of_phase("backward"):
        cotangent_CBLM = jnp.concatenate([cotangent_BLM[None], cotangent_CBLM])
        return loss, (gradient.astype(kernel.dtype), cotangent_CBLM)


def _backward(scoring, residuals, cotangent):
    del scoring
    gradient, cotangent_CBLM = (cotangent.astype(one.dtype) * one for one in residuals)
    return gradient, _Chunks(cotangent_CBLM, None, None)  # pyright: ignore[reportArgumentType]


_summed.defvjp(_forward, _backward)


def _loss(scoring: Scoring, scores_BLV: jax.Array, chunk: _Chunks) -> jax.Array:
    return summed_cross_entropy(scores_BLV, chunk.targets, chunk.valid, scoring.axes)


def _names(dims: str) -> list[str]:
    """The dims of the two operands and of the result."""
    return dims.replace("->", ",").split(",")
