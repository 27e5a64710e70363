"""Products of codes of all experts in one call: ``torch.nn.functional.scaled_grouped_mm`` with scales of 32.

Each expert's rows are an operand of their own, with blocks that begin at its first row or token, as in the products of one expert each.

| product | first operand | second operand | the result |
|---|---|---|---|
| output, input gradient | rows of all experts, one after the other | a matrix of each expert | rows of all experts |
| weight gradient | outputs, by tokens of all experts | inputs, by the same tokens | a matrix of each expert |

An expert's rows and tokens are filled up with codes of 0 to a multiple of 32, so that none is empty where its tokens are summed. Of what
differs between experts scales are swizzled expert by expert, and follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from shardwright.core.recipes.kernels import KernelName, kernel_named
from shardwright.core.recipes.recipe import Product
from shardwright.engine_torch.precision.kernels import Narrow, as_codes, filled, mx_scales, rows_of
from shardwright.engine_torch.precision.scales import TILE_ROWS


def multiplied_by_expert(
    kernel: KernelName, product: Product, xs: Sequence[Narrow], ys: Sequence[Narrow]
) -> list[torch.Tensor]:
    """For each expert the sums over what is contracted, in bfloat16."""
    tiles = kernel_named(kernel, "aten").tiles
    if product == "weight_gradient":
        left = torch.cat([rows_of(x, tiles.contracted, tiles.contracted) for x in xs], 1)
        by_expert = [filled(rows_of(y, tiles.contracted, tiles.contracted), 0, tiles.second) for y in ys]
        right = torch.cat(by_expert, 1)
        of_left, of_right = _scales_by_tokens(xs, left), _scales_by_tokens(ys, right)
        ends = list(accumulate(codes.shape[1] for codes in by_expert))
        sums = _summed(as_codes(left, xs[0]), as_codes(right, ys[0]), of_left, of_right, ends)
        return [matrix[:, : y.shape[0]] for matrix, y in zip(sums.unbind(), ys, strict=True)]
    by_expert = [filled(rows_of(x, tiles.contracted), 0, tiles.first) for x in xs]
    left, sizes = torch.cat(by_expert), [len(codes) for codes in by_expert]
    right = torch.stack([filled(rows_of(y, tiles.contracted), 0, tiles.second) for y in ys])
    if not left.numel():
        return [left.new_zeros((x.shape[0], y.shape[0]), dtype=torch.bfloat16) for x, y in zip(xs, ys, strict=True)]
    of_left = torch.cat([mx_scales(x) for x in xs])
    of_right = torch.stack([mx_scales(y).flatten() for y in ys])
    sums = _summed(as_codes(left, xs[0]), as_codes(right, ys[0]), of_left, of_right, list(accumulate(sizes)))
    return [rows[: x.shape[0], : y.shape[0]] for rows, x, y in zip(sums.split(sizes), xs, ys, strict=True)]


def _scales_by_tokens(operands: Sequence[Narrow], codes: torch.Tensor) -> torch.Tensor:
    lines = -(-codes.shape[0] // TILE_ROWS) * TILE_ROWS
    return torch.cat([mx_scales(operand).flatten() for operand in operands]).view(lines, -1)


def _summed(
    left: torch.Tensor, right: torch.Tensor, of_left: torch.Tensor, of_right: torch.Tensor, ends: Sequence[int]
) -> torch.Tensor:
    return _grouped(left, right, of_left, of_right, torch.tensor(ends, dtype=torch.int32, device=left.device))


@torch.library.custom_op("shardwright::grouped_codes", mutates_args=())
def _grouped(
    left: torch.Tensor, right: torch.Tensor, of_left: torch.Tensor, of_right: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    """PyTorch has no result without values of its own function."""
    return functional.scaled_grouped_mm(  # pyright: ignore[reportAttributeAccessIssue]
        left,
        right.mT,
        of_left,
        ScalingType.BlockWise1x32,
        of_right,
        ScalingType.BlockWise1x32,
        SwizzleType.SWIZZLE_32_4_4,
        SwizzleType.SWIZZLE_32_4_4,
        offs=ends,
        output_dtype=torch.bfloat16,
    )


@_grouped.register_fake
def _(left: torch.Tensor, right: torch.Tensor, of_left: torch.Tensor, of_right: torch.Tensor, ends: torch.Tensor):
    del of_left, of_right
    of_experts = right.dim() == 3
    shape = (left.shape[0], right.shape[1]) if of_experts else (len(ends), left.shape[0], right.shape[0])
    return left.new_empty(shape, dtype=torch.bfloat16)
