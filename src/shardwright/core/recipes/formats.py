"""The narrow number formats of operands and of their scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """A format of ``bits`` bits. ``mantissa``: explicit bits of the significand. ``least_exponent``: that of the smallest normal value.

    ``has_infinity``: e5m2 has; a value above the largest would become infinite in one engine and NaN in another, so every
    value is clipped before a cast.
    """

    bits: int
    mantissa: int
    least_exponent: int
    largest: float
    has_infinity: bool = False

    @property
    def smallest(self) -> float:
        """The smallest positive value: a subnormal, where the format has one."""
        return 2.0 ** (self.least_exponent - self.mantissa)


E4M3, E5M2, E2M1, E8M0 = "float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float8_e8m0fnu"
"""Names as ml_dtypes, JAX and PyTorch have them."""

FORMATS: Mapping[str, NumberFormat] = {
    # arXiv:2209.05433, table 1.
    E4M3: NumberFormat(bits=8, mantissa=3, least_exponent=-6, largest=448.0),
    E5M2: NumberFormat(bits=8, mantissa=2, least_exponent=-14, largest=57344.0, has_infinity=True),
    # OCP Microscaling Formats 1.0, sections 5.3.3 and 5.4.1.
    E2M1: NumberFormat(bits=4, mantissa=1, least_exponent=0, largest=6.0),
    E8M0: NumberFormat(bits=8, mantissa=0, least_exponent=-127, largest=2.0**127),
}


def bits_of(dtype: str) -> int:
    """Bits of a format, or of a scale in float32.

    >>> bits_of(E2M1), bits_of("float32")
    (4, 32)
    """
    return 32 if dtype == "float32" else FORMATS[dtype].bits
