"""PyTorch's products of codes on a GPU that is not there: what its documentation and its checks of arguments say, in float64.

Each call is checked twice: by ``torch``'s own function for tensors without values on such a GPU, and by what its C++ code requires in
addition (``ScaledBlas.cpp``, ``GroupedBlas.cpp``, ``CUDAScaledBlas.cpp``). Scales are read by their place in the layout that
NVIDIA documents, one by one, and multiply the values of their codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

SCALED_MM = functional.scaled_mm
E4M3, E8M0, E2M1 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2
OF_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BLOCKS = {
    ScalingType.BlockWise1x16: (1, 16),
    ScalingType.BlockWise1x32: (1, 32),
    ScalingType.BlockWise1x128: (1, 128),
    ScalingType.BlockWise128x128: (128, 128),
}


def imagined(x: torch.Tensor) -> torch.Tensor:
    """A tensor without values on a GPU that is not there, of the same layout. Within ``FakeTensorMode``."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")


def offsets(rows: int, blocks: int) -> np.ndarray:
    """Where each scale is, by row and block (docs.nvidia.com/cuda/cublas, 1D Block Scaling Factors Layout)."""
    row, block = np.ogrid[:rows, :blocks]
    tile = row // 128 * -(-blocks // 4) + block // 4
    return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4


def in_order(scales: torch.Tensor, rows: int, blocks: int) -> np.ndarray:
    """Bytes of scales by row and block, out of tiles."""
    flat = scales.contiguous().view(torch.uint8).flatten().numpy()
    assert flat.size == -(-rows // 128) * 128 * (-(-blocks // 4) * 4)
    return flat[offsets(rows, blocks)]


def numbers(codes: torch.Tensor) -> np.ndarray:
    """The values of rows of codes, float64."""
    if codes.dtype != E2M1:
        return codes.float().double().numpy()
    pairs = codes.contiguous().view(torch.uint8).numpy()
    each = np.stack([pairs & 15, pairs >> 4], -1).reshape(len(pairs), -1)
    return np.where(each > 7, -1.0, 1.0) * np.array(OF_E2M1)[each & 7]


def scaled(rows: torch.Tensor, scales: torch.Tensor, kind: ScalingType) -> np.ndarray:
    """The values of rows of codes whose scales are in tiles."""
    x, extent = numbers(rows), BLOCKS[kind][1]
    of_blocks = in_order(scales, len(x), -(-x.shape[1] // extent))
    if scales.dtype == E8M0:
        factors = np.where(of_blocks == 255, np.nan, np.ldexp(1.0, of_blocks.astype(int) - 127))
    else:
        factors = torch.from_numpy(of_blocks).view(E4M3).double().numpy()
    return x * factors.repeat(extent, 1)[:, : x.shape[1]]


def scaled_mm(left: torch.Tensor, right: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    """``torch.nn.functional.scaled_mm`` on compute capability 10.0, in float64."""
    of_left, kinds, of_right, kinds_right = (one if isinstance(one, list) else [one] for one in given)
    orders, orders_right = (one if isinstance(one, list) else [one] for one in (named["swizzle_a"], named["swizzle_b"]))
    with FakeTensorMode():
        SCALED_MM(
            imagined(left),
            imagined(right),
            [imagined(one) for one in of_left],
            kinds,
            [imagined(one) for one in of_right],
            kinds_right,
            **named,
        )
    assert named["output_dtype"] == torch.bfloat16
    assert not named["use_fast_accum"]
    assert kinds == kinds_right, "block scales of 128 are Hopper's"
    assert orders == orders_right
    assert left.dtype == right.dtype
    assert all(one.is_contiguous() for one in (left, right.T, *of_left, *of_right))
    values = []
    if kinds == [ScalingType.BlockWise1x32]:
        assert left.dtype == E4M3
        assert orders == [SwizzleType.SWIZZLE_32_4_4]
    else:
        assert kinds == [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        assert left.dtype == E2M1
        assert orders == [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    for rows, scales in ((left, of_left), (right.T, of_right)):
        x = scaled(rows, scales[0], kinds[0])
        values.append(x if len(scales) == 1 else x * scales[1].double().item())
    return torch.from_numpy(values[0] @ values[1].T)


def scaled_grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    kind: ScalingType,
    of_right: torch.Tensor,
    kind_right: ScalingType,
    order: SwizzleType,
    order_right: SwizzleType,
    *,
    offs: torch.Tensor,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """``torch.nn.functional.scaled_grouped_mm`` with scales of 32 on compute capability 10.0, in float64."""
    with FakeTensorMode():
        # The one of its functions that PyTorch checks without a GPU.
        torch._scaled_grouped_mm(  # pyright: ignore[reportPrivateImportUsage]
            *(imagined(one) for one in (left, right, of_left, of_right, offs)), out_dtype=output_dtype
        )
    assert kind == kind_right == ScalingType.BlockWise1x32
    assert order == order_right == SwizzleType.SWIZZLE_32_4_4
    assert left.dtype == right.dtype == E4M3
    assert of_left.dtype == of_right.dtype == E8M0
    assert all(one.is_contiguous() for one in (left, right.mT, of_left, of_right))
    assert not left.shape[-1] % 16
    assert not right.shape[-1] % 16
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    if right.dim() == 3:
        assert ends[-1] == len(left)
        assert of_left.shape[0] >= len(left)
        lines, sums = 0, torch.full((len(left), right.shape[-1]), torch.nan, dtype=torch.float64)
        for start, end, matrix, scales in zip(starts, ends, right, of_right, strict=True):
            assert not (end - start) % 32
            more = -(-(end - start) // 128) * 128
            x = scaled(left[start:end], of_left[lines : lines + more], kind)
            sums[start:end] = torch.from_numpy(x @ scaled(matrix.T, scales, kind).T)
            lines += more
        assert lines == len(of_left)
        return sums
    assert ends[-1] == left.shape[1] == right.shape[0]
    rows, columns = -(-left.shape[0] // 128) * 128, -(-right.shape[1] // 128) * 128
    assert (of_left.shape[0], of_right.shape[0]) == (rows, columns)
    return torch.stack(
        [*_by_tokens(left, right, of_left.flatten(), of_right.flatten(), list(zip(starts, ends, strict=True)))]
    )


def _by_tokens(
    left: torch.Tensor,
    right: torch.Tensor,
    of_left: torch.Tensor,
    of_right: torch.Tensor,
    groups: Sequence[tuple[int, int]],
):
    first = 0
    for start, end in groups:
        assert end > start, "what an empty sum is, PyTorch does not say"
        assert not (end - start) % 32
        last, values = first + -(-(end - start) // 128) * 4, []
        for rows, scales in ((left, of_left), (right.T, of_right)):
            lines = -(-len(rows) // 128) * 128
            values.append(scaled(rows[:, start:end], scales[first * lines : last * lines], ScalingType.BlockWise1x32))
        yield torch.from_numpy(values[0] @ values[1].T)
        first = last
    assert first * (-(-len(left) // 128) * 128) == len(of_left)
