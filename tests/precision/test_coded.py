"""Weights of which codes were gathered, as products take them: the codes of a transpose are those of the transposed weight."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.presets import preset
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_jax.precision import coded as of_jax
from shardwright.engine_jax.precision.kernels import rows_of
from shardwright.engine_jax.precision.operands import codes_of as codes_of_jax
from shardwright.engine_torch.precision import coded as of_torch
from shardwright.engine_torch.precision.operands import codes_of as codes_of_torch
from tests.precision.made import ordinary

SHAPE = (48, 64)
"""Outputs and inputs."""

ALIKE = ("fp8-current", "fp8-block", "nvfp4")


def weight_quantizer(name: str) -> Quantizer:
    return preset(name).quantizers["output", "weight"]


def in_jax(name: str, found: Quantized | None = None) -> of_jax.Coded:
    quantizer, x = weight_quantizer(name), jnp.asarray(ordinary(3, SHAPE))
    return of_jax.Coded(
        carrier=jnp.zeros((SHAPE[1], 3, 16)),
        first=codes_of_jax(x, quantizer) if found is None else found,
        shard=None,
        amaxes={},
        quantizers=(quantizer, quantizer),
        second=None,
        sizes=(SHAPE[0], SHAPE[1]),
    )


def in_torch(name: str) -> of_torch.Coded:
    quantizer, x = weight_quantizer(name), torch.from_numpy(ordinary(3, SHAPE))
    return of_torch.Coded(
        carrier=torch.zeros(SHAPE),
        first=codes_of_torch(x, quantizer),
        second=None,
        quantizers=(quantizer, quantizer),
        sizes=SHAPE,
    )


def same(ours: Sequence[object], theirs: Sequence[object]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("name", ALIKE)
def test_a_kernel_of_jax_takes_the_codes_of_the_transpose(name: str) -> None:
    quantizer, x = weight_quantizer(name), jnp.asarray(ordinary(3, SHAPE))
    operand = in_jax(name).operand("input_gradient")
    assert isinstance(operand, of_jax.Codes)
    kernel = "nvfp4" if name == "nvfp4" else "fp8" if name == "fp8-current" else "bfloat16"
    ours = operand.rows(kernel)
    theirs = rows_of(kernel, codes_of_jax(x.T, quantizer), x.T.shape, quantizer)
    same(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    assert np.array_equal(operand.values(), np.asarray(in_jax(name).operand("output").values()).T)  # pyright: ignore


@pytest.mark.parametrize("name", ALIKE)
def test_a_kernel_of_pytorch_takes_the_codes_of_the_transpose(name: str) -> None:
    operand = in_torch(name).operand("input_gradient")
    assert isinstance(operand, of_torch.Codes)
    (ours,) = operand.narrow()
    theirs = codes_of_torch(torch.from_numpy(ordinary(3, SHAPE)).T, weight_quantizer(name))
    assert tuple(ours.shape) == SHAPE[::-1]
    assert ours.found.codes.view(torch.uint8).equal(theirs.codes.view(torch.uint8))
    assert ours.found.scales.contiguous().view(torch.uint8).equal(theirs.scales.view(torch.uint8))


@pytest.mark.parametrize("product", ["output", "input_gradient"])
@pytest.mark.parametrize("name", ["fp8-block", "nvfp4", "fp8-current"])
@pytest.mark.parametrize(("first", "num"), [(1, 1), (0, 2)])
def test_heads_that_are_in_use_have_the_values_of_all(name: str, product: str, first: int, num: int) -> None:
    """Of 3 heads of 16 outputs: slices that end inside blocks of 128, and between those of 16."""
    whole = in_torch(name).operand("output").values().numpy()  # pyright: ignore
    wanted = whole[first * 16 : (first + num) * 16]
    wanted = wanted if product == "output" else wanted.T
    theirs = in_torch(name).outputs(first * 16, num * 16).operand(product)  # pyright: ignore
    ours = in_jax(name).heads(first, num).operand(product)  # pyright: ignore
    assert np.array_equal(theirs.values().numpy(), wanted)  # pyright: ignore
    assert np.array_equal(np.asarray(ours.values()), wanted)  # pyright: ignore
