"""Casts of what a load reads, held against those of ml_dtypes: every 16-bit pattern, and float32 near each tie."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from shardwright.checkpoint.reading.casting import cast


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", ["float32", "bfloat16", "float16"])
def test_casts_are_those_of_ml_dtypes(source: str, target: str) -> None:
    def dtype(name: str) -> np.dtype:
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    if source == "float32":
        rng = np.random.default_rng(0)
        near = (rng.integers(0, 2**16, 2**18, np.uint32) << 16) + rng.integers(0x7FF8, 0x8008, 2**18, np.uint32)
        bits = np.concatenate([rng.integers(0, 2**32, 2**20, np.uint32), near])
    else:
        bits = np.arange(2**16, dtype=np.uint16)
    with np.errstate(all="ignore"):
        needed = bits.view(dtype(source)).astype(np.float32).astype(dtype(target))
    found = cast(bits, source, target).view(dtype(target))
    numbers = ~np.isnan(needed.astype(np.float32))
    assert np.array_equal(np.isnan(found.astype(np.float32)), ~numbers)
    assert found[numbers].tobytes() == needed[numbers].tobytes()
