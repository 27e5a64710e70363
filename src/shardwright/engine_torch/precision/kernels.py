"""Products of codes on GPUs, by the kernels of ``core/recipes/kernels.py`` that PyTorch has.

M and N rows of the two operands, K elements that are contracted.

``torch.nn.functional.scaled_mm`` takes codes and scales. It exists for CPUs too, hundreds of times slower than a product of values: there
the core chooses ``float32``. Rows of the first operand and columns of the second are contiguous, K and N are multiples of 16, or of 128
with scales of blocks, and scales of blocks lie along the rows. What is missing is padded with codes of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional

from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.kernels import CPU, Device, KernelName
from shardwright.core.recipes.recipe import Quantizer

ALIGNED, BLOCK = 16, 128
LINES = 4
"""Scales of blocks of 128 x 128 along K are padded to a multiple of it."""


class Narrow(NamedTuple):
    """An operand with its quantizer. ``shape``: before it was quantized; all dims but the first are contracted."""

    found: Quantized
    quantizer: Quantizer
    shape: Sequence[int]


@torch.compiler.assume_constant_result
def product_device(kind: str) -> Device:
    """What multiplies on a device of this type; a GPU of another vendor counts as a CPU, and so does one that is only imagined."""
    return _product_device(kind)


@cache
def _product_device(kind: str) -> Device:
    if kind != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return CPU
    major, minor = torch.cuda.get_device_capability()
    return Device(kind="GPU", capability=(major, minor))


def multiplied(kernel: KernelName, x: Narrow, y: Narrow) -> torch.Tensor:
    """The sums over K of the products of both, MN in bfloat16."""
    unit = BLOCK if kernel == "fp8 by blocks" else ALIGNED
    left = _padded(_merged(x), 1, unit)
    right = _padded(_padded(_merged(y), 1, unit), 0, unit)
    if not left.numel():
        return torch.zeros((x.shape[0], y.shape[0]), dtype=torch.bfloat16, device=left.device)
    by_tensor = all(one.found.scales.numel() == 1 for one in (x, y))
    if kernel == "fp8 by blocks":
        scales, kinds = zip(*(_of_blocks(one, codes.shape) for one, codes in ((x, left), (y, right))), strict=True)
    elif by_tensor:
        scales, kinds = [one.found.scales.reshape(1) for one in (x, y)], [functional.ScalingType.TensorWise] * 2
    else:
        of_x, of_y = (_of_rows(one, codes.shape[0]) for one, codes in ((x, left), (y, right)))
        scales, kinds = [of_x, of_y.T.contiguous()], [functional.ScalingType.RowWise] * 2
    sums = functional.scaled_mm(
        left, right.T, scales[0], kinds[0], scales[1], kinds[1], output_dtype=torch.bfloat16, use_fast_accum=False
    )
    return sums.narrow(1, 0, y.shape[0])


def _merged(one: Narrow) -> torch.Tensor:
    """Rows of codes; the last contracted dim up to the end of its last block."""
    block = one.quantizer.block.contracted
    codes = one.found.codes if block is None else _padded(one.found.codes, one.found.codes.dim() - 1, block)
    return codes.flatten(1)


def _padded(codes: torch.Tensor, dim: int, unit: int) -> torch.Tensor:
    more = -codes.shape[dim] % unit
    if not more:
        return codes.contiguous()
    shape = [more if each == dim else size for each, size in enumerate(codes.shape)]
    # Bytes: few operations exist for codes.
    zeros = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    return torch.cat([codes.view(torch.uint8), zeros], dim).view(codes.dtype)


def _of_rows(one: Narrow, rows: int) -> torch.Tensor:
    """A scale of each row, also where one is of the tensor; 1 for rows of padding."""
    scales = one.found.scales.reshape(-1, 1).expand(one.shape[0], 1)
    return torch.cat([scales, scales.new_ones((rows - one.shape[0], 1))]).contiguous()


def _of_blocks(one: Narrow, shape: torch.Size) -> tuple[torch.Tensor, functional.ScalingType]:
    rows, columns = -(-shape[0] // (one.quantizer.block.other or shape[0])), shape[1] // BLOCK
    scales = one.found.scales.reshape(one.found.scales.shape[0], -1)
    square = one.quantizer.block.other == BLOCK
    lines = -(-columns // LINES) * LINES if square else columns
    full = functional.pad(scales, (0, lines - scales.shape[1], 0, rows - scales.shape[0]), value=1.0)
    if square:
        return full.T, functional.ScalingType.BlockWise128x128
    return full.T.clone(memory_format=torch.contiguous_format).T, functional.ScalingType.BlockWise1x128
