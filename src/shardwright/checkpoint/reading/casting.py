"""Elements in another floating-point dtype, as unsigned integers of their bits: no library has to know bfloat16."""

from __future__ import annotations

import numpy as np

FLOATS = ("float32", "bfloat16", "float16")
"""The dtypes that published weights may have."""


def cast(bits: np.ndarray, source: str, target: str) -> np.ndarray:
    """The same elements in dtype ``target``, rounded to nearest, ties to even. The same array where nothing changes.

    >>> cast(np.array([0x3F80, 0xC000], np.uint16), "bfloat16", "float32").view(np.float32)
    array([ 1., -2.], dtype=float32)
    """
    if source == target:
        return bits
    wide = _widened(bits, source)
    if target == "float32":
        return wide.view(np.uint32)
    if target == "float16":
        with np.errstate(over="ignore"):
            return wide.astype(np.float16).view(np.uint16)
    assert target == "bfloat16", target
    whole = wide.view(np.uint32)
    odd = (whole >> np.uint32(16)) & np.uint32(1)
    rounded = ((whole + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
    # Rounding could make an infinity of a NaN. It stays one, quiet and with its sign.
    quiet = (whole >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    return np.where(np.isnan(wide), quiet, rounded)


def _widened(bits: np.ndarray, source: str) -> np.ndarray:
    if source == "float32":
        return bits.view(np.float32)
    if source == "float16":
        return bits.view(np.float16).astype(np.float32)
    assert source == "bfloat16", source
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
