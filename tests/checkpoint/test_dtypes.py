"""The bytes of arrays, in whatever order their elements are in memory: those of NumPy's ``tobytes``."""

from __future__ import annotations

from itertools import permutations

import ml_dtypes
import numpy as np
import pytest

from shardwright.checkpoint.format import dtypes
from shardwright.checkpoint.format.dtypes import as_bytes


@pytest.mark.parametrize("dtype", ["float32", "V2", ml_dtypes.bfloat16, "uint8", "complex64", ">i4"], ids=str)
@pytest.mark.parametrize("tile", [(1, 1), (2, 3), (64, 256)])
def test_any_order_in_memory(dtype: object, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "TILE", tile)
    known, rng = np.dtype(dtype), np.random.default_rng(0)  # pyright: ignore[reportArgumentType]
    for shape in ((), (3,), (4, 7), (3, 1, 5), (2, 3, 4, 5), (0, 3), (65, 300)):
        array = np.frombuffer(rng.bytes(int(np.prod(shape)) * known.itemsize), known).reshape(shape)
        for order in list(permutations(range(len(shape))))[:8]:
            for one in (array.transpose(order), array.transpose(order)[..., ::-1] if shape else array):
                little = one.astype(known.newbyteorder("<")) if known.byteorder == ">" else one
                assert as_bytes(one).tobytes() == little.tobytes()
