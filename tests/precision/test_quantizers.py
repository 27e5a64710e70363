"""The quantizers of both engines against NumPy with the casts of ml_dtypes: equal bytes, for every quantizer of every preset."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from shardwright.core.recipes.formula import Quantized, amax_of
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_jax.precision import operands as on_jax
from shardwright.engine_torch.precision import operands as on_torch
from tests.precision.made import ARRAYS
from tests.precision.oracle import quantized

RECIPES = [PRESETS[name]() for name in PRESETS] + [PRESETS["fp8-current"](use_power_2_scales=True)]


def name_of(quantizer: Quantizer) -> str:
    scale = quantizer.scale
    return f"{quantizer.dtype}, {quantizer.block.text}, {scale.rule}, {scale.dtype}"


QUANTIZERS = {
    name_of(one): one
    for recipe in RECIPES
    for one in recipe.quantizers.values()
    if one.rounding == "nearest" and one.amax == "current"
}
"""Each that differs in its codes: what a transform gives is quantized as any other operand. ``test_random.py`` has stochastic rounding,
``test_delayed.py`` delayed amaxes."""


def as_numpy(result: Quantized, columns: int) -> tuple[np.ndarray, np.ndarray, float | None]:
    """The bits of codes, one a byte; scales as float32, those of E8M0 as their bits; the scale of the tensor."""
    codes, scales, of_tensor = (None if one is None else _array(one) for one in result)
    assert codes is not None
    assert scales is not None
    codes = codes.view(np.uint8)
    if codes.shape[1] * 2 == columns:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(codes.shape[0], -1)
    scales = scales.view(np.uint8) if "e8m0" in scales.dtype.name else scales
    return codes, scales.astype(np.float32), None if of_tensor is None else float(of_tensor)


def _array(one: jax.Array | torch.Tensor) -> np.ndarray:
    if isinstance(one, torch.Tensor):
        narrow = one.element_size() == 1
        array = one.view(torch.uint8).numpy() if narrow else one.numpy()
        return array.view(jnp.dtype(str(one.dtype).removeprefix("torch.")))
    return np.asarray(one)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_both_engines_have_the_bytes_of_the_oracle(name: str) -> None:
    quantizer = QUANTIZERS[name]
    compiled = jax.jit(partial(on_jax.quantized, quantizer=quantizer))
    for kind, x in ARRAYS.items():
        expected = quantized(x, quantizer)
        for engine, result in (
            ("JAX", compiled(x)),
            ("PyTorch", on_torch.quantized(torch.from_numpy(x), quantizer)),
        ):
            found = as_numpy(result, x.shape[1])
            for what, ours, theirs in zip(("codes", "scales", "scale of the tensor"), found, expected, strict=True):
                np.testing.assert_array_equal(ours, theirs, err_msg=f"{engine}, {kind}: {what}")


@pytest.mark.parametrize("name", [name for name, one in QUANTIZERS.items() if one.of_tensor])
def test_a_compiler_rounds_the_scale_of_each_tensor_as_the_formula_does(name: str) -> None:
    """As of experts: a thousand tensors at once, of which each has one scale, so that a last bit is seen."""
    quantizer, draw = QUANTIZERS[name], np.random.default_rng(8)
    x = draw.standard_normal((1000, 16, 16)) * np.exp(draw.uniform(-9, 9, (1000, 1, 1)))
    x = x.astype(np.float32)
    ours = jax.jit(partial(on_jax.quantized, quantizer=quantizer))(x)
    theirs = on_torch.quantized(torch.from_numpy(x), quantizer)
    for what, our, their in zip(Quantized._fields, ours, theirs, strict=True):
        assert (our is None) == (their is None)
        if our is not None:
            np.testing.assert_array_equal(_array(our).view(np.uint8), _array(their).view(np.uint8), err_msg=what)


@pytest.mark.parametrize("name", QUANTIZERS)
def test_both_engines_have_the_values_of_the_codes(name: str) -> None:
    """Within half of the distance of two codes; infinite and NaN elements are never finite."""
    quantizer = QUANTIZERS[name]
    compiled = jax.jit(partial(on_jax.values, quantizer=quantizer))
    half = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3, "float4_e2m1fn": 0.25}[quantizer.dtype]
    for kind in ("ordinary", "edge", "infinite", "NaN", "zeros"):
        x = ARRAYS[kind]
        ours = np.asarray(compiled(x))
        np.testing.assert_array_equal(ours, on_torch.values(torch.from_numpy(x), quantizer).numpy(), err_msg=kind)
        assert not np.isfinite(ours[~np.isfinite(x)]).any(), kind
        if kind == "zeros":
            assert not ours.any()
        elif kind == "ordinary" and quantizer.block.contracted == 32:
            amax = np.abs(x).reshape(len(x), -1, 32).max(-1, keepdims=True).repeat(32, -1).reshape(x.shape)
            np.testing.assert_array_less(np.abs(ours - x), half * np.maximum(np.abs(x), amax * 2.0**-13) + 1e-30)


@pytest.mark.parametrize("shape", [(0, 64), (32, 0), (0, 4, 64), (32, 0, 64), (32, 3, 0)])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_an_operand_without_elements_has_no_codes_and_an_amax_of_zero(name: str, shape: tuple[int, ...]) -> None:
    """As that of a rank to which no token came. The last dims are contracted."""
    quantizer = QUANTIZERS[name]
    contracted, found = len(shape) - 1, []
    for on, x in ((on_torch, torch.zeros(shape)), (on_jax, jnp.zeros(shape))):

        def both(x: Any, on: ModuleType = on) -> tuple[Quantized, Any]:
            codes = on.quantized(x, quantizer, contracted_dims=contracted)
            return codes, amax_of(x, quantizer, on.ARRAYS, contracted_dims=contracted)

        one, amax = (both if on is on_torch else jax.jit(both))(x)
        assert 0 in one.codes.shape
        assert not _array(amax).any()
        found.append(one)
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert _array(ours).tobytes() == _array(theirs).tobytes()
