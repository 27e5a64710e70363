"""Quantizers in NumPy, block by block, with the casts of ml_dtypes: from the sources of the formats, not from ours."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np

from shardwright.core.recipes.recipe import Quantizer

LARGEST = {name: float(ml_dtypes.finfo(getattr(ml_dtypes, name)).max) for name in ("float8_e4m3fn", "float8_e5m2")}
LARGEST["float4_e2m1fn"] = 6.0
F32 = np.float32


def blocks_of(shape: tuple[int, int], quantizer: Quantizer) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """The place of each block among the blocks, and its elements."""
    rows, columns = quantizer.block.other or shape[0], quantizer.block.contracted or shape[1]
    for i in range(-(-shape[0] // rows)):
        for j in range(-(-shape[1] // columns)):
            yield (i, j), np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]


def quantized(
    x: np.ndarray, quantizer: Quantizer, random: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32 | None]:
    """The bits of codes (one a byte, also of 4 bits), scales as numbers (E8M0: their bits), and the scale of the tensor.

    ``random``: the number below 2^24 by which each element is rounded stochastically; None: to the nearest.
    """
    x = np.where(np.abs(x) < np.finfo(F32).tiny, np.copysign(F32(0), x), x)
    dtype = getattr(ml_dtypes, quantizer.dtype)
    largest = LARGEST[quantizer.dtype]
    blocks = list(blocks_of(x.shape, quantizer))
    scales = np.zeros([max(place[dim] for place, _ in blocks) + 1 for dim in (0, 1)], F32)
    codes = np.zeros(x.shape, np.uint8)
    of_tensor = _of_tensor(np.abs(x).max(), largest) if quantizer.scale.of_tensor else None
    for place, elements in blocks:
        scaled, scales[place] = _scaled(x[elements], quantizer, largest, of_tensor)
        nan = np.isnan(scaled)
        clipped = np.clip(scaled, -largest, largest).astype(F32)
        clipped = clipped if random is None else neighbour(clipped, random[elements], quantizer.dtype)
        narrow = clipped.astype(dtype).view(np.uint8)
        canonical = 7 if quantizer.dtype == "float4_e2m1fn" else np.array(np.nan, dtype).view(np.uint8) & 0x7F
        codes[elements] = np.where(nan, canonical, narrow)
    return codes, scales, of_tensor


def neighbour(x: np.ndarray, random: np.ndarray, dtype: str) -> np.ndarray:
    """The value of the format above or below each magnitude: above, if its share of the distance is more than what is left of it."""
    lower, upper = neighbours(np.abs(x), dtype)
    share = (np.abs(x).astype(np.float64) - lower) / np.where(upper > lower, upper - lower, 1)
    return np.copysign(np.where(random + np.floor(share * 2**24) >= 2**24, upper, lower), x).astype(F32)


def neighbours(x: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The values of a format below and above, in float64: among all of its values, by ml_dtypes."""
    bits = np.arange(16 if dtype == "float4_e2m1fn" else 256, dtype=np.uint8)
    known = bits.view(getattr(ml_dtypes, dtype)).astype(np.float64)
    known = np.unique(known[np.isfinite(known)])
    place = np.searchsorted(known, x.astype(np.float64), side="right") - 1
    return known[place], known[np.minimum(place + 1, len(known) - 1)]


def _scaled(v: np.ndarray, quantizer: Quantizer, largest: float, of_tensor: F32 | None) -> tuple[np.ndarray, float]:
    amax = float(np.abs(v).max())
    if of_tensor is not None:
        with np.errstate(invalid="ignore"):
            relative = F32(amax) / F32(largest) / of_tensor
        scale = np.clip(relative, F32(2.0**-6), F32(448)).astype(ml_dtypes.float8_e4m3fn).astype(F32)
        return v * (F32(1) / of_tensor / scale), float(scale)
    if quantizer.scale.dtype == "float8_e8m0fnu":
        return _microscaled(v, amax, quantizer.scale.rule == "power of two up", largest)
    if not np.isfinite(amax):
        return np.full(v.shape, np.nan), np.nan
    if quantizer.scale.rule == "exact":
        factor = F32(largest) / max(F32(amax), F32(largest * 2.0**-126)) if amax else F32(1)
        return v * factor, float(F32(1) / factor)
    exponent = max(_exponent(amax, largest, up=quantizer.scale.rule == "power of two up"), -126) if amax else 0
    return v.astype(np.float64) / 2.0**exponent, 2.0**exponent


def _microscaled(v: np.ndarray, amax: float, up: bool, largest: float) -> tuple[np.ndarray, float]:
    if np.isnan(amax):
        return np.full(v.shape, np.nan), 255
    if np.isinf(amax):
        # 2^128, the value after the largest of float32, in the rule that rounds down; the largest scale in that which rounds up.
        exponent = 127 if up else 128 - int(np.log2(largest))
    else:
        exponent = np.clip(_exponent(amax, largest, up), -127, 127) if amax else -127
    return v.astype(np.float64) / 2.0**exponent if exponent > -127 else v * 0, exponent + 127


def _exponent(amax: float, largest: float, up: bool) -> int:
    """In float64, which has both quotient and powers of two exactly enough."""
    if up:
        fraction, exponent = np.frexp(amax / largest)
        return int(exponent) - (fraction == 0.5)
    return int(np.frexp(amax)[1]) - int(np.frexp(largest)[1])


def _of_tensor(amax: np.float32, largest: float) -> np.float32:
    if not np.isfinite(amax):
        return F32(np.nan)
    return F32(max(amax, F32(largest * 448 * 2.0**-126)) / F32(largest * 448)) if amax else F32(1)
