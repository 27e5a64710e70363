"""Random bits, stochastic rounding and the random Hadamard transform: both engines alike, and against what others define."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from scipy.linalg import hadamard

from shardwright.core.recipes.formats import E2M1, E4M3, E5M2
from shardwright.core.recipes.formula import dequantize, quantize
from shardwright.core.recipes.hadamard import SIZES, transformed
from shardwright.core.recipes.random_bits import threefry as of_numbers
from shardwright.core.recipes.recipe import PER_TENSOR, Quantizer, Scale
from shardwright.engine_jax.precision.arrays import ARRAYS as JAX
from shardwright.engine_jax.precision.random_bits import threefry as on_jax
from shardwright.engine_torch.precision.arrays import ARRAYS as TORCH
from shardwright.engine_torch.precision.random_bits import threefry as on_torch
from tests.precision.made import ARRAYS
from tests.precision.oracle import neighbours

KNOWN = {
    (0, 0, 0, 0): (0x6B200159, 0x99BA4EFE),
    (0xFFFFFFFF,) * 4: (0x1CB996FC, 0xBB002BE7),
    (0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3): (0xC4923A9C, 0x483DF7A0),
}
"""Of keys and counters: the vectors that Random123 publishes for Threefry-2x32 of 20 rounds."""

ALL = 1 << 24
"""How many random numbers a rounding can get."""


def in_torch(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int32))


def test_random_bits_are_those_of_the_paper_on_both_engines() -> None:
    for (*key, first, second), expected in KNOWN.items():
        assert of_numbers((key[0], key[1]), (first, second)) == expected
        counter = np.array([[first], [second]], np.uint32)
        found = on_torch((key[0], key[1]), in_torch(counter[0]), in_torch(counter[1]))
        assert tuple(int(word) & 0xFFFFFFFF for word in found) == expected
        found = on_jax((jnp.uint32(key[0]), jnp.uint32(key[1])), jnp.asarray(counter[0]), jnp.asarray(counter[1]))
        assert tuple(int(word[0]) for word in found) == expected


def test_both_engines_have_the_same_bits_of_many_counters() -> None:
    rng = np.random.default_rng(0)
    key, rows, columns = (rng.integers(0, 2**32, shape, np.uint32) for shape in ((2, 1), (50, 1), (1, 70)))
    ours = on_torch((int(key[0, 0]), int(key[1, 0])), in_torch(rows), in_torch(columns))
    theirs = on_jax((jnp.uint32(key[0, 0]), jnp.uint32(key[1, 0])), jnp.asarray(rows), jnp.asarray(columns))
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our.numpy().view(np.uint32), np.asarray(their))


def stochastic(dtype: str) -> Quantizer:
    return Quantizer(dtype=dtype, block=PER_TENSOR, scale=Scale(rule="exact"), rounding="stochastic")


def rounded(x: np.ndarray, random: np.ndarray, dtype: str) -> np.ndarray:
    """The values of the codes, of both engines, which must agree. The largest of ``x`` must be that of the format."""
    quantizer = stochastic(dtype)
    ours = quantize(torch.from_numpy(x), quantizer, TORCH, random=torch.from_numpy(random))
    theirs = jax.jit(partial(quantize, quantizer=quantizer, on=JAX))(x, random=random)
    np.testing.assert_array_equal(ours.codes.view(torch.uint8).numpy(), np.asarray(theirs.codes).view(np.uint8))
    return dequantize(ours, x.shape, quantizer, TORCH).numpy()


@pytest.mark.parametrize("dtype", [E2M1, E4M3, E5M2])
def test_a_value_is_rounded_up_by_exactly_its_share_of_the_random_numbers(dtype: str) -> None:
    """At the random numbers just below and at the one from which on it must be rounded up, and at the ends: rounding never
    decreases in the random number, so these count all of them. Away from 0 for positive values, towards it for negative ones."""
    largest = float(ml_dtypes.finfo(getattr(ml_dtypes, dtype)).max)
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.uniform(-1, 1, 400) * largest * 2.0 ** rng.integers(-12, 1, 400), [largest, 0.0, -0.0]])
    x = x.astype(np.float32).reshape(1, -1)
    magnitude = np.abs(x)
    lower, upper = neighbours(magnitude, dtype)
    share = (magnitude.astype(np.float64) - lower) / np.where(upper > lower, upper - lower, 1)
    # Below the smallest value of the format a share has more bits than random numbers have.
    times = np.floor(share * ALL).astype(np.int64)
    assert (times == share * ALL)[magnitude > 2.0 * lower[lower > 0].min()].all()
    for random, expected in (
        (ALL - times - 1, np.where(times == ALL, upper, lower)),
        (np.minimum(ALL - times, ALL - 1), np.where(times > 0, upper, lower)),
        (np.zeros_like(times), lower),
        (np.full_like(times, ALL - 1), np.where(times > 0, upper, lower)),
    ):
        ours = rounded(x, random.astype(np.int32), dtype)
        np.testing.assert_array_equal(ours, np.copysign(expected, x).astype(np.float32))


def test_over_all_random_numbers_the_mean_is_the_value() -> None:
    """Values that are multiples of 2^-11, whose shares are of 2^-12, each with 2^12 random numbers as far apart: the mean is exact."""
    steps = 1 << 12
    x = np.tile(np.arange(-6, 6, 61 / 2048)[:, None], (1, steps))
    x = np.concatenate([x, np.full((1, steps), 6.0)]).astype(np.float32)
    random = np.broadcast_to(np.arange(steps, dtype=np.int32) * (ALL // steps), x.shape)
    found = rounded(x, np.ascontiguousarray(random), E2M1)
    np.testing.assert_array_equal(found.astype(np.float64).mean(axis=1), x[:, 0])


def test_not_a_number_stays_one() -> None:
    x = torch.tensor([[1.0, torch.nan, 3.0, -torch.inf]])
    quantizer = stochastic(E4M3)
    random = torch.zeros(x.shape, dtype=torch.int32)
    assert dequantize(quantize(x, quantizer, TORCH, random=random), x.shape, quantizer, TORCH).isnan().all()


def signs_of(size: int) -> np.ndarray:
    return np.float32([1, -1])[np.random.default_rng(size).integers(0, 2, size)]


@pytest.mark.parametrize("size", SIZES)
def test_a_transform_is_that_of_the_matrix_and_leaves_products(size: int) -> None:
    """Of rows of 100, the last group of which is filled with zeros."""
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2, 5, 100)).astype(np.float32) for _ in range(2))
    signs = torch.from_numpy(signs_of(size))
    ours, other = (transformed(torch.from_numpy(one), signs, TORCH).numpy() for one in (x, y))
    groups = np.pad(x, ((0, 0), (0, 0), (0, -100 % size))).reshape(2, 5, -1, size).astype(np.float64)
    expected = (groups * signs.numpy()) @ hadamard(size) / np.sqrt(size)
    np.testing.assert_allclose(ours.reshape(expected.shape), expected, atol=4e-7 * np.sqrt(size))
    products = np.einsum("ank,amk->anm", x.astype(np.float64), y), np.einsum("ank,amk->anm", ours, other)
    np.testing.assert_allclose(products[1], products[0], atol=1e-4)


@pytest.mark.parametrize("kind", ARRAYS)
def test_both_engines_transform_to_the_same_bits(kind: str) -> None:
    x, signs = ARRAYS[kind], signs_of(16)
    ours = transformed(torch.from_numpy(x), torch.from_numpy(signs), TORCH).numpy()
    theirs = np.asarray(jax.jit(lambda x, signs: transformed(x, signs, JAX))(x, signs))
    # Quantizers have no subnormal elements, and NaN has one code, whatever its bits.
    ours, theirs = (np.where(np.abs(one) < np.finfo(np.float32).tiny, 0, one) for one in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)
