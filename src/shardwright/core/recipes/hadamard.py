"""The random Hadamard transform of the operands of a product along the dim that it contracts (arXiv:2509.25149, section 4.2).

Each group of ``size`` elements is multiplied with a random sign for each of its places, and then with the Hadamard matrix of
Sylvester's order divided by the root of ``size``. That is an orthogonal matrix: where both operands of a product are transformed
alike, the product is the same but for rounding, and an outlier is spread over its group.

The sums are those of the fast transform, stage by stage, so every engine rounds alike. Groups begin at the edge of the last dim; the
last one is filled with zeros, and its transformed elements are terms of the product like all others.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from shardwright.core.recipes.arrays import Arrays

SIZES = (4, 16, 64)
"""Squares, so that the division is exact, and few enough for the random bits of one number."""

_MAGNITUDE, _LEAST_NORMAL = 0x7FFFFFFF, 0x00800000


def padded_to(length: int, size: int) -> int:
    """How many elements groups of ``size`` have that begin with the first of ``length``.

    >>> padded_to(48, 16), padded_to(50, 16)
    (48, 64)
    """
    return -(-length // size) * size


def transformed(x: Any, signs: Any, on: Arrays) -> Any:
    """An operand, any float dtype, transformed along its last dim, float32. ``signs``: 1 or -1 for each place of a group, float32."""
    size = signs.shape[0]
    assert size in SIZES, size
    *outer, length = x.shape
    x = on.float32(x)
    if length % size:
        x = on.padded(x, len(outer), padded_to(length, size))
    x = _without_subnormal(on.reshape(x, (-1, size)), on) * (on.reshape(signs, (1, size)) / isqrt(size))
    half = 1
    while half < size:
        pairs = on.reshape(_without_subnormal(x, on), (-1, 2, half))
        first, second = pairs[:, 0], pairs[:, 1]
        x = on.joined(first + second, first - second)
        half *= 2
    return on.reshape(x, (*outer, padded_to(length, size)))


def _without_subnormal(x: Any, on: Arrays) -> Any:
    """XLA's programs for CPUs and TPUs have no subnormal numbers, and PyTorch has."""
    return on.where((on.bits(x) & _MAGNITUDE) < _LEAST_NORMAL, x * 0, x)
