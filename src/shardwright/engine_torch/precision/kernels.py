"""Products of codes on GPUs, by the kernels of ``core/recipes/kernels.py`` that PyTorch has.

M and N rows of the two operands, K elements that are contracted.

``torch.nn.functional.scaled_mm`` takes codes and scales. It exists for CPUs too, hundreds of times slower than a product of values: there
the core chooses ``float32``. Rows of the first operand and columns of the second are contiguous, and sizes are multiples of those that the
core's table states. What is missing is padded with codes of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn import functional
from torch.nn.functional import ScalingType, SwizzleType

from shardwright.core.recipes.formats import E2M1
from shardwright.core.recipes.formula import Quantized
from shardwright.core.recipes.kernels import CPU, LARGE_BLOCK, Device, KernelName, kernel_named
from shardwright.core.recipes.recipe import Quantizer
from shardwright.engine_torch.precision.scales import of_each_row, powers_of_two, swizzled

LINES = 4
"""Scales of blocks of 128 x 128 along K are padded to a multiple of it."""


class Narrow(NamedTuple):
    """An operand with its quantizer. ``shape``: before it was quantized; all dims but the first are contracted."""

    found: Quantized
    quantizer: Quantizer
    shape: Sequence[int]

    @property
    def per_byte(self) -> int:
        """Codes in a byte."""
        return 2 if self.quantizer.dtype == E2M1 else 1


class Scales(NamedTuple):
    """What a product is given of an operand besides its codes: scales, or those of blocks and that of the tensor; in which order."""

    array: torch.Tensor | list[torch.Tensor]
    kind: ScalingType | list[ScalingType]
    order: SwizzleType | list[SwizzleType] | None = None


@torch.compiler.assume_constant_result
def product_device(kind: str) -> Device:
    """What multiplies on a device of this type; a GPU of another vendor counts as a CPU, and so does one that is only imagined."""
    return _product_device(kind)


@cache
def _product_device(kind: str) -> Device:
    if kind != "cuda" or torch.version.cuda is None or not torch.cuda.is_available():
        return CPU
    major, minor = torch.cuda.get_device_capability()
    cuda_major, cuda_minor, *_ = map(int, torch.version.cuda.split("."))
    return Device(
        kind="GPU",
        capability=(major, minor),
        cuda=(cuda_major, cuda_minor),
        # Which PyTorch asks of itself in its tests too.
        of_experts="USE_MSLK" in torch.__config__.show(),
    )


def multiplied(kernel: KernelName, x: Narrow, y: Narrow) -> torch.Tensor:
    """The sums over K of the products of both, MN in bfloat16."""
    tiles = kernel_named(kernel, "aten").tiles
    left, right = (rows_of(operand, tiles.contracted) for operand in (x, y))
    right = filled(right, 0, tiles.second)
    if not left.numel():
        return torch.zeros((x.shape[0], y.shape[0]), dtype=torch.bfloat16, device=left.device)
    of_left, of_right = _scales(kernel, x, y, left, right)
    sums = functional.scaled_mm(
        as_codes(left, x),
        as_codes(right, y).T,
        of_left.array,
        of_left.kind,
        of_right.array,
        of_right.kind,
        swizzle_a=of_left.order,
        swizzle_b=of_right.order,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return sums.narrow(1, 0, y.shape[0])


def rows_of(operand: Narrow, unit: int, least: int = 0) -> torch.Tensor:
    """Rows of bytes; the last contracted dim up to the end of its last block, all of them up to a multiple of ``unit`` elements."""
    codes, block = operand.found.codes.view(torch.uint8), operand.quantizer.block.contracted
    codes = codes if block is None else filled(codes, codes.dim() - 1, block // operand.per_byte)
    return filled(codes.flatten(1), 1, unit // operand.per_byte, least // operand.per_byte)


def filled(codes: torch.Tensor, dim: int, unit: int, least: int = 0) -> torch.Tensor:
    """Bytes of codes with zeros at the end of a dim up to a multiple of ``unit``, and at least to ``least``."""
    size = codes.shape[dim]
    more = max(-(-size // unit) * unit, least) - size
    if not more:
        return codes.contiguous()
    shape = [more if each == dim else length for each, length in enumerate(codes.shape)]
    return torch.cat([codes, torch.zeros(shape, dtype=torch.uint8, device=codes.device)], dim)


def as_codes(rows: torch.Tensor, operand: Narrow) -> torch.Tensor:
    """Bytes as what they are codes of."""
    return rows.view(torch.float4_e2m1fn_x2 if operand.per_byte > 1 else operand.found.codes.dtype)


def mx_scales(operand: Narrow) -> torch.Tensor:
    """In E8M0 and swizzled, of each row and each 32 of K."""
    powers = powers_of_two(_in_rows(operand.found.scales), operand.quantizer)
    return swizzled(of_each_row(powers, operand.quantizer, operand.shape[0])).view(torch.float8_e8m0fnu)


def _in_rows(scales: torch.Tensor) -> torch.Tensor:
    return scales.reshape(scales.shape[0], -1)


def _scales(kernel: KernelName, x: Narrow, y: Narrow, left: torch.Tensor, right: torch.Tensor) -> tuple[Scales, Scales]:
    if kernel == "nvfp4":
        return _nvfp4_scales(x), _nvfp4_scales(y)
    if kernel == "mx":
        of_x, of_y = (
            Scales(mx_scales(operand), ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4) for operand in (x, y)
        )
        return of_x, of_y
    if kernel == "fp8 by blocks":
        return _of_large_blocks(x, left.shape), _of_large_blocks(y, right.shape)
    if all(operand.found.scales.numel() == 1 for operand in (x, y)):
        of_x, of_y = (Scales(operand.found.scales.reshape(1), ScalingType.TensorWise) for operand in (x, y))
        return of_x, of_y
    of_y = _of_rows(y, right.shape[0]).T.contiguous()
    return Scales(_of_rows(x, left.shape[0]), ScalingType.RowWise), Scales(of_y, ScalingType.RowWise)


def _nvfp4_scales(operand: Narrow) -> Scales:
    by_row = of_each_row(_in_rows(operand.found.scales.view(torch.uint8)), operand.quantizer, operand.shape[0])
    return Scales(
        [swizzled(by_row).view(torch.float8_e4m3fn), operand.found.of_tensor.reshape(1)],
        [ScalingType.BlockWise1x16, ScalingType.TensorWise],
        [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE],
    )


def _of_rows(operand: Narrow, rows: int) -> torch.Tensor:
    """A scale of each row, also where one is of the tensor; 1 for rows of padding."""
    scales = operand.found.scales.reshape(-1, 1).expand(operand.shape[0], 1)
    return torch.cat([scales, scales.new_ones((rows - operand.shape[0], 1))]).contiguous()


def _of_large_blocks(operand: Narrow, shape: torch.Size) -> Scales:
    rows, columns = -(-shape[0] // (operand.quantizer.block.other or shape[0])), shape[1] // LARGE_BLOCK
    scales = _in_rows(operand.found.scales)
    square = operand.quantizer.block.other == LARGE_BLOCK
    lines = -(-columns // LINES) * LINES if square else columns
    full = functional.pad(scales, (0, lines - scales.shape[1], 0, rows - scales.shape[0]), value=1.0)
    if square:
        return Scales(full.T, ScalingType.BlockWise128x128)
    return Scales(full.T.clone(memory_format=torch.contiguous_format).T, ScalingType.BlockWise1x128)
