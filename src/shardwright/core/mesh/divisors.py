"""Divisors and multiples near a number."""

from __future__ import annotations

from math import isqrt

LARGEST_TRIED = 1 << 16
"""The largest factor that is tried: every divisor of a number below 2 ** 32 is found, and no mistyped size hangs."""


def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number of at least 1, ascending: those up to ``LARGEST_TRIED`` and their quotients.

    >>> divisors(12)
    (1, 2, 3, 4, 6, 12)
    """
    small = [d for d in range(1, min(isqrt(number), LARGEST_TRIED) + 1) if number % d == 0]
    return (*small, *(number // d for d in reversed(small) if d * d != number))


def nearest_divisors(number: int, near: int, count: int = 4) -> tuple[int, ...]:
    """The divisors nearest to ``near``, the nearest first; of two at the same distance, the smaller first.

    >>> nearest_divisors(8, 6)
    (4, 8, 2, 1)
    """
    return tuple(sorted(divisors(number), key=lambda d: (abs(d - near), d))[:count])


def nearest_multiples(factor: int, number: int) -> tuple[int, ...]:
    """The positive multiples of ``factor`` next to a number that is not a multiple: below it, if any, and above it.

    >>> nearest_multiples(8, 12), nearest_multiples(8, 4)
    ((8, 16), (8,))
    """
    below = number // factor * factor
    return (below, below + factor) if below else (factor,)
