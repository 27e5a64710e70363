"""Operands with every kind of value that a quantizer treats in its own way."""

from __future__ import annotations

import numpy as np

SHAPE = (48, 256)
"""12,288 elements, in blocks of 32 and 128 features, and of 16 rows; blocks of 128 rows are larger than the array."""

FEW = (16, 256)
"""Of an array with one kind of extreme values."""

LARGEST = float(np.finfo(np.float32).max)
SUBNORMAL = 2.0**-149


def ordinary(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Normal values, float32, rows of very different sizes, with zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, (*shape[:-1], 1))
    x = x.astype(np.float32)
    x[rng.random(shape) < 0.02] = 0.0
    x[rng.random(shape) < 0.02] = -0.0
    return x


def on_the_edge(seed: int = 1) -> np.ndarray:
    """Values halfway between codes, and amaxes at and beside those where an exponent changes, in blocks of 16."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.integers(-64, 65, SHAPE), rng.integers(-8, 3, SHAPE)).astype(np.float32)
    blocks = x.reshape(-1, 16)
    amax = np.float32([448.0, 57344.0, 6.0, 1.0, 256.0, 4.0])[rng.integers(0, 6, len(blocks))]
    amax = np.ldexp(amax, rng.integers(-60, 60, len(blocks))).astype(np.float32)
    beside = rng.integers(0, 3, len(blocks))
    amax = np.where(beside == 0, amax, np.nextafter(amax, np.where(beside == 1, 0, np.inf).astype(np.float32)))
    blocks *= (amax / 64)[:, None]
    blocks[np.arange(len(blocks)), rng.integers(0, 16, len(blocks))] = amax
    return blocks.reshape(SHAPE)


def extreme() -> dict[str, np.ndarray]:
    """One array for each kind of value that spoils a scale."""
    rng = np.random.default_rng(2)
    exponents = rng.integers(-160, -90, (FEW[0], 1))
    tiny = np.ldexp(rng.standard_normal(FEW), exponents).astype(np.float32)
    huge = np.ldexp(rng.uniform(-1, 1, FEW), rng.integers(100, 129, (FEW[0], 1))).astype(np.float32)
    huge[3, 5], huge[10, 200] = LARGEST, -LARGEST
    return {
        "zeros": np.zeros(FEW, np.float32),
        "subnormal": np.full(FEW, SUBNORMAL, np.float32) * rng.integers(-9, 9, FEW).astype(np.float32),
        "tiny": tiny,
        "huge": huge,
        "infinite": with_values(ordinary(3, FEW), [np.inf, -np.inf]),
        "NaN": with_values(ordinary(4, FEW), [np.nan, -np.nan]),
    }


def with_values(x: np.ndarray, values: list[float]) -> np.ndarray:
    """The array with these values in some of its rows, and a block of zeros."""
    x = x.copy()
    for number, value in enumerate(values):
        x[number * 3 :: 7, 17 + 100 * number] = value
    x[8:, 128:] = 0
    return x


ARRAYS = {"ordinary": ordinary(), "edge": on_the_edge(), "bfloat16": ordinary(5, FEW), **extreme()}
ARRAYS["bfloat16"] = (ARRAYS["bfloat16"].view(np.uint32) & 0xFFFF0000).view(np.float32)
