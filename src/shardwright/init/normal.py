"""Truncated normal values from random bits, with operations that IEEE 754 rounds exactly: + - * / and the square root.

``np.log``, ``np.exp`` and similar functions differ in the last bit between processors and versions; these do not.
"""

from __future__ import annotations

import numpy as np

CUTOFF = 3.0
"""The standard normal is truncated here, on both sides."""

MASS = 0.9973002039367398
"""Probability that a standard normal value is within the cutoff: erf(3 / sqrt(2))."""

STDDEV = 0.9865783925581086
"""Standard deviation of the truncated normal: sqrt(1 - 6 phi(3) / MASS), with phi the normal density."""

_LN_2 = 0.6931471805599453
_SQRT_HALF = 0.7071067811865476
_LOG_SERIES = tuple(2.0 / (2 * n + 1) for n in range(10, -1, -1))

# Wichura, "Algorithm AS 241: the percentage points of the normal distribution", Applied Statistics 37 (1988),
# 477-484, routine PPND16: coefficients of the highest power first.
_CENTRE = 0.425
_CENTRE_SQUARED = 0.180625
_CENTRE_NUMERATOR = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_CENTRE_DENOMINATOR = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_TAIL_NUMERATOR = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_TAIL_DENOMINATOR = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)


def truncated_normal(bits: np.ndarray) -> np.ndarray:
    """A standard normal value, truncated at ``CUTOFF``, for each 64 random bits (uint64 to float64).

    The upper 52 bits select one of 2**52 slices of equal probability; the value is the quantile of its middle.
    So the slice opposite to another gives the negated value, and 0 and the cutoff itself never occur.

    >>> ends = truncated_normal(np.array([0, 2**63, 2**64 - 1], np.uint64))
    >>> [round(value, 9) for value in ends.tolist()]
    [-3.0, 0.0, 3.0]
    """
    slices = (bits ^ np.uint64(1 << 63)).view(np.int64) >> 12
    q = slices.astype(np.float64)
    q += 0.5
    q *= MASS * 2.0**-52
    return quantile(q)


def quantile(q: np.ndarray) -> np.ndarray:
    """The quantile of the standard normal at the probability 0.5 + q, for abs(q) < 0.5 - 1e-10 (AS 241, PPND16)."""
    rest = q * q
    np.subtract(_CENTRE_SQUARED, rest, out=rest)
    # The tails are wrong here and are computed below. The denominator's first root, -0.0729, is beyond them.
    value = _polynomial(_CENTRE_NUMERATOR, rest)
    value *= q
    value /= _polynomial(_CENTRE_DENOMINATOR, rest)

    (tail,) = np.nonzero(np.abs(q) > _CENTRE)
    q_tail = q[tail]
    rest = np.sqrt(-log(0.5 - np.abs(q_tail)))
    rest -= 1.6
    value_tail = _polynomial(_TAIL_NUMERATOR, rest)
    value_tail /= _polynomial(_TAIL_DENOMINATOR, rest)
    value[tail] = np.copysign(value_tail, q_tail)
    return value


def log(x: np.ndarray) -> np.ndarray:
    """Natural logarithm of positive values, within 2e-16 of the exact result where that is below -0.3.

    x = m * 2**e with sqrt(1/2) <= m < sqrt(2), and log(m) = 2 artanh(s) with s = (m - 1) / (m + 1), by its series.
    """
    mantissa, exponent = np.frexp(x)
    small = mantissa < _SQRT_HALF
    mantissa = np.where(small, 2.0 * mantissa, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    return (exponent - small) * _LN_2 + s * _polynomial(_LOG_SERIES, s * s)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray) -> np.ndarray:
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result += coefficient
        result *= x
    result += coefficients[-1]
    return result
