"""Seconds and rates as findings write them."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """Seconds in the largest unit in which the number is at least 1.

    >>> [seconds_text(s) for s in (0.000_056_2, 0.0451, 12.3)]
    ['56.2 us', '45.1 ms', '12.3 s']
    """
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds * 1e6)} us"


def rate_text(bytes_per_s: float) -> str:
    """
    >>> rate_text(6.25e9), rate_text(370e9)
    ('6.25 GB/s', '370 GB/s')
    """
    return f"{bytes_per_s / 1e9:.4g} GB/s"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"
