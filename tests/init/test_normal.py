"""The quantile function and the logarithm against implementations that we did not write."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

from shardwright.init import normal
from shardwright.init.counter import key_of, scramble


def test_quantile_agrees_with_the_standard_library() -> None:
    q = np.concatenate([np.linspace(-normal.MASS / 2, normal.MASS / 2, 50_000), [-0.425, 0.425, 0.0]])
    expected = np.array([NormalDist().inv_cdf(0.5 + value) for value in q])
    # Near the cutoff the standard library's argument, 0.5 + q, is itself rounded to 1e-16, which 1 / phi(3) magnifies.
    np.testing.assert_allclose(normal.quantile(q), expected, rtol=0, atol=5e-14)


def test_log_agrees_with_the_standard_library() -> None:
    x = np.concatenate([np.geomspace(1e-6, 0.74, 20_000), np.geomspace(1.4, 1e6, 20_000)])
    expected = np.array([math.log(value) for value in x])
    np.testing.assert_allclose(normal.log(x), expected, rtol=5e-16, atol=0)


def test_constants_of_the_truncated_normal() -> None:
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    mass = math.erf(3 / math.sqrt(2))
    assert mass == normal.MASS
    assert math.isclose(math.sqrt(1 - 6 * density / mass), normal.STDDEV, rel_tol=1e-15)


def test_opposite_bits_give_opposite_values() -> None:
    bits = scramble(np.arange(10_000, dtype=np.uint64), key_of(0, "w"))
    values = normal.truncated_normal(bits)
    np.testing.assert_array_equal(normal.truncated_normal(~bits), -values)
    assert values[np.argsort(bits)].tolist() == sorted(values.tolist())


def test_scramble_agrees_with_plain_integers() -> None:
    """The mixing as published, written again with Python's integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    key = key_of(12, "layers/up")
    index = [0, 1, 2, 2**31, 2**32 + 5, 2**63]
    expected = [mix(mix((i * 0x9E3779B97F4A7C15 + int(key[0])) % 2**64) ^ int(key[1])) for i in index]
    assert scramble(np.array(index, np.uint64), key).tolist() == expected


def test_each_bit_is_set_in_half_of_the_values() -> None:
    bits = scramble(np.arange(1 << 16, dtype=np.uint64), key_of(0, "w"))
    for place in range(64):
        share = float(((bits >> np.uint64(place)) & np.uint64(1)).mean())
        assert abs(share - 0.5) < 5 * 0.5 / 256, place
