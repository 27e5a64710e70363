"""The loss in chunks, with both gradients, against PyTorch's cross-entropy of all tokens in float64; and that no array is as large as the
logits of all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from shardwright.engine_jax.layers.chunked_loss import chunked_cross_entropy
from shardwright.engine_jax.layers.embedding import Scoring
from tests.engine_jax.program import assert_steps_are_planned
from tests.engine_jax.steps import Case, assert_trains_as, compiled_step, plan_of
from tests.engine_jax.test_loss import LENGTH, ROWS, VOCAB, inputs
from tests.sameness.cases import losses

EMBED = 5
DIMS = {"BLM,MV->BLV": (EMBED, VOCAB), "BLM,VM->BLV": (VOCAB, EMBED)}


def operands(dims: str, dtype: Any = np.float32) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x_BLM = rng.normal(size=(ROWS, LENGTH, EMBED)).astype(dtype)
    return x_BLM, rng.normal(size=DIMS[dims]).astype(dtype)


def scoring_of(dims: str, entries: int | None = None) -> Scoring:
    return Scoring(dims=dims, dtype="float32", entries=entries)


def loss_and_gradients(dims: str, x_BLM: Any, kernel: Any, num_chunks: int) -> tuple[Any, tuple[Any, Any]]:
    _, targets_BL, valid_BL = inputs()

    def loss(x_BLM: jax.Array, kernel: jax.Array) -> jax.Array:
        targets, valid = jnp.asarray(targets_BL), jnp.asarray(valid_BL)
        return 3 * chunked_cross_entropy(x_BLM, kernel, targets, valid, scoring_of(dims), num_chunks)

    return jax.value_and_grad(loss, argnums=(0, 1))(x_BLM, kernel)


def in_float64(dims: str, x_BLM: np.ndarray, kernel: np.ndarray, entries: int = VOCAB) -> tuple[Any, np.ndarray, Any]:
    """PyTorch's, of the same numbers."""
    _, targets_BL, valid_BL = inputs()
    x, weight = (torch.tensor(one.astype(np.float64), requires_grad=True) for one in (x_BLM, kernel))
    matrix = weight if dims == "BLM,MV->BLV" else weight.T
    logits = (x @ matrix).flatten(0, 1)[:, :entries]
    targets = torch.tensor(np.where(valid_BL, targets_BL % entries, -100)).long().flatten()
    loss = 3 * torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    loss.backward()
    assert x.grad is not None
    assert weight.grad is not None
    return loss.item(), x.grad.numpy(), weight.grad.numpy()


@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("chunks", [3, 7, ROWS * LENGTH])
def test_chunks_have_the_loss_and_the_gradients_of_all_tokens(chunks: int, dims: str) -> None:
    """Chunks end with rows, inside rows, and after each token."""
    x_BLM, kernel = operands(dims)
    loss, gradients = loss_and_gradients(dims, x_BLM, kernel, chunks)
    their_loss, *theirs = in_float64(dims, x_BLM, kernel)
    np.testing.assert_allclose(loss, their_loss, rtol=1e-6)
    for gradient, expected in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


def test_a_weight_s_gradient_in_bfloat16_is_rounded_once() -> None:
    """Half a unit in the last place, and what the rounding of the cotangents adds: each of the tokens' by half a unit."""
    dims = "BLM,MV->BLV"
    x_BLM, kernel = operands(dims, ml_dtypes.bfloat16)
    chunked, whole = (
        loss_and_gradients(dims, jnp.asarray(x_BLM), jnp.asarray(kernel), chunks)[1][1] for chunks in (ROWS * LENGTH, 1)
    )
    assert chunked.dtype == jnp.bfloat16
    # The same rounded cotangents are summed, in float32: two sums can be rounded to neighbours.
    _, _, exact = in_float64(dims, x_BLM, kernel)
    unit = np.abs(exact) * 2.0**-7
    assert (np.abs(np.asarray(chunked, np.float64) - np.asarray(whole, np.float64)) <= unit).all()
    assert np.mean(np.asarray(chunked) == np.asarray(whole)) > 0.9


def test_the_padding_of_a_vocabulary_has_no_gradient() -> None:
    dims, entries = "BLM,VM->BLV", VOCAB - 2
    x_BLM, kernel = operands(dims)
    _, targets_BL, valid_BL = inputs()

    def loss(kernel: jax.Array) -> jax.Array:
        targets = jnp.asarray(np.where(valid_BL, targets_BL % entries, 0))
        x, valid, scoring = jnp.asarray(x_BLM), jnp.asarray(valid_BL), scoring_of(dims, entries)
        return 3 * chunked_cross_entropy(x, kernel, targets, valid, scoring, 7)

    found, gradient = jax.value_and_grad(loss)(kernel)
    expected, _, theirs = in_float64(dims, x_BLM, kernel, entries)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, theirs, rtol=0, atol=2e-6 * np.abs(theirs).max())
    assert not gradient[entries:].any()


@pytest.mark.matrix
@pytest.mark.parametrize("case", list(losses()), ids=str)
def test_trains_as_one_device(case: Case) -> None:
    assert_trains_as(case, case.alone)
    assert_steps_are_planned(str(compiled_step(case).as_text()), plan_of(case))


def test_no_array_is_as_large_as_the_logits() -> None:
    dims = "BLM,MV->BLV"
    largest = {
        chunks: max(
            sizes_in(jax.make_jaxpr(lambda x, k, c=chunks: loss_and_gradients(dims, x, k, c))(*operands(dims)).jaxpr)
        )
        for chunks in (1, 7)
    }
    assert largest == {1: ROWS * LENGTH * VOCAB, 7: ROWS * LENGTH * EMBED}


def sizes_in(jaxpr: Any) -> Iterator[int]:
    """The sizes of all results in a program, and in the programs that it calls."""
    for equation in jaxpr.eqns:
        yield from (one.aval.size for one in equation.outvars if hasattr(one.aval, "size"))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from sizes_in(inner)
