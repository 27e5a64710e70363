"""Our quantizers beside those of torchao: equal bytes, and where they differ on purpose, which and why."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import EPS, tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from shardwright.core.recipes.formats import E4M3, E5M2, E8M0
from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.presets import PRESETS
from shardwright.core.recipes.recipe import PER_ROW, PER_TENSOR, Block, Quantizer, Scale
from shardwright.engine_torch.precision.operands import quantized
from tests.precision.made import ARRAYS

FINITE = ("ordinary", "edge", "bfloat16", "zeros", "huge")
UP, DOWN = "power of two up", "power of two down"


def bits(one: torch.Tensor) -> np.ndarray:
    return one.view(torch.uint8).numpy()


def blockwise(array: np.ndarray, size: int) -> np.ndarray:
    return array.reshape(len(array), -1, size)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("rule", [UP, DOWN])
def test_microscaling(dtype: str, rule: str) -> None:
    quantizer = Quantizer(dtype=dtype, block=Block(contracted=32, other=1), scale=Scale(rule=rule, dtype=E8M0))
    mode = ScaleCalculationMode.RCEIL if rule == UP else ScaleCalculationMode.FLOOR
    for kind, x in ARRAYS.items():
        scales, codes = to_mx(torch.from_numpy(x), getattr(torch, dtype), 32, mode)
        ours = quantized(torch.from_numpy(x), quantizer)
        amax = np.abs(blockwise(x, 32)).max(-1)
        by_logarithm = _has_rounded_logarithm(amax, float(torch.finfo(getattr(torch, dtype)).max))
        same = ~by_logarithm if rule == UP else np.ones_like(by_logarithm)
        np.testing.assert_array_equal(bits(ours.scales)[same], bits(scales)[same], err_msg=kind)
        if rule == UP:
            # The instruction of a GPU rounds up exactly, as ours.
            np.testing.assert_array_equal(bits(ours.scales)[by_logarithm], bits(scales)[by_logarithm] + 1, err_msg=kind)
        # A scale that is NaN makes every value NaN; rounded down, torchao keeps codes of 0 for finite elements.
        same &= ~np.isnan(amax)
        # Rounded down, torchao's smallest scale is stored as 2^-127 and used as 2^-126; ours has codes of 0.
        same &= (bits(ours.scales) > 0) | (amax == 0) | (rule == UP)
        compared = same[..., None] & ~_subnormal(blockwise(x, 32))
        ours_codes, theirs = blockwise(bits(ours.codes), 32), blockwise(bits(codes), 32)
        np.testing.assert_array_equal(ours_codes[compared], theirs[compared], err_msg=kind)
        assert same.mean() > (0.5 if kind not in ("tiny", "subnormal") else -1), kind


def _subnormal(x: np.ndarray) -> np.ndarray:
    """Elements that are 0 on TPUs and in XLA's programs for CPUs, and so in ours everywhere."""
    return (x != 0) & (np.abs(x) < np.finfo(np.float32).tiny)


def _has_rounded_logarithm(amax: np.ndarray, largest: float) -> np.ndarray:
    """Where amax is so little above a power of two times the largest that the logarithm of their quotient, in float32, is an
    integer: on a CPU torchao takes that power, and clips."""
    with np.errstate(divide="ignore", invalid="ignore"):
        quotient = (amax / np.float32(largest)).astype(np.float32)
        logarithm = np.log2(quotient.astype(np.float64))
        rounded = np.float32(logarithm)
    return (rounded == np.floor(logarithm)) & (logarithm > rounded) & (rounded >= -127)


@pytest.mark.parametrize("name", ["fp8-current", "fp8-row"])
def test_float8(name: str) -> None:
    for quantizer in {*PRESETS[name]().quantizers.values()}:
        row = quantizer.block == PER_ROW
        assert row or quantizer.block == PER_TENSOR
        dtype = getattr(torch, quantizer.dtype)
        for kind in FINITE:
            x = torch.from_numpy(ARRAYS[kind])
            factor = tensor_to_scale(
                x,
                dtype,
                scaling_granularity=ScalingGranularity.AXISWISE if row else ScalingGranularity.TENSORWISE,
                axiswise_dim=1 if row else None,
                round_scales_to_power_of_2=quantizer.scale.rule == UP,
            )
            ours = quantized(x, quantizer)
            # Below its smallest amax torchao's scale stays; ours follows, and is 1 for zeros.
            amax = x.abs().amax(1, keepdim=True) if row else x.abs().max().reshape(1, 1)
            same = (amax >= EPS).numpy().ravel()
            if row:
                same &= ~_has_rounded_logarithm(amax.numpy().ravel(), torch.finfo(dtype).max)
            theirs = to_fp8_saturated(x * factor, dtype)
            by_scale = (len(same), -1)
            np.testing.assert_array_equal(
                bits(ours.codes).reshape(by_scale)[same], bits(theirs).reshape(by_scale)[same], err_msg=kind
            )
            scales = (1 / factor).numpy().ravel()
            np.testing.assert_array_equal(ours.scales.numpy().ravel()[same], scales[same], err_msg=kind)
            assert same.mean() > 0.9 or kind in ("zeros", "edge"), kind


def test_four_bits_with_two_levels() -> None:
    quantizer = PRESETS["nvfp4"]().quantizers["output", "input"]
    for kind in (*FINITE, "tiny", "infinite"):
        x = torch.from_numpy(ARRAYS[kind])
        ours: Quantized = quantized(x, quantizer)
        if kind == "zeros":
            assert (float(ours.of_tensor), ours.codes.view(torch.uint8).any()) == (1.0, False)
            continue
        scales, codes = nvfp4_quantize(x, per_tensor_scale=ours.of_tensor)
        np.testing.assert_array_equal(bits(ours.scales), bits(scales), err_msg=kind)
        if kind == "infinite":
            # The scale of the tensor is infinite in torchao and NaN in ours; the codes have no meaning.
            continue
        theirs = per_tensor_amax_to_scale(x.abs().max())
        assert float(ours.of_tensor) == float(theirs), kind
        np.testing.assert_array_equal(bits(ours.codes), bits(codes), err_msg=kind)
