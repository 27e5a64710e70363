"""Scales of codes as a GPU's products take them.

M rows of an operand, N blocks of its contracted dim. Bytes are moved: few operations exist for scales of 8 bits.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shardwright.core.recipes.formats import E8M0
from shardwright.core.recipes.kernels import MX_BLOCK
from shardwright.core.recipes.recipe import Quantizer

TILE_ROWS, TILE_BLOCKS, LINES = 128, 4, 32
"""A tile of scales in ``swizzled``: its rows, its blocks, and the lines of 16 bytes that it is stored as."""

_EXPONENT, _FRACTION_BITS = 0xFF, 23


def of_each_row(scales_MN: torch.Tensor, quantizer: Quantizer, rows: int) -> torch.Tensor:
    """The scales of blocks, of which one may be of several rows or of all, for each of so many rows."""
    return scales_MN.repeat_interleave(quantizer.block.other or max(rows, 1), 0)[:rows]


def powers_of_two(scales_MN: torch.Tensor, quantizer: Quantizer) -> torch.Tensor:
    """Scales that are powers of two, as bytes of E8M0 with one for each 32 elements of the contracted dim; a block of 128 is four.

    >>> from shardwright.core.recipes.presets import preset
    >>> quantizer = preset("fp8-block").quantizers["output", "input"]
    >>> powers_of_two(torch.tensor([[1.0, 0.25]]), quantizer)
    tensor([[127, 127, 127, 127, 125, 125, 125, 125]], dtype=torch.uint8)
    """
    block = quantizer.block.contracted
    assert block is not None, quantizer
    if quantizer.scale.dtype == E8M0:
        exponents = scales_MN.view(torch.uint8)
    else:
        exponents = ((scales_MN.contiguous().view(torch.int32) >> _FRACTION_BITS) & _EXPONENT).to(torch.uint8)
    return exponents.repeat_interleave(block // MX_BLOCK, 1)


def swizzled(scales_MN: torch.Tensor) -> torch.Tensor:
    """Scales of one byte in tiles of 128 rows and 4 blocks, filled up with zeros: ``SwizzleType.SWIZZLE_32_4_4`` of PyTorch.

    The tiles of the same rows follow each other. In a tile the scale of row ``r`` and block ``n`` is byte
    ``(r % 32) * 16 + r // 32 * 4 + n`` (docs.nvidia.com/cuda/cublas, "1D Block Scaling Factors Layout"). The result has the shape of
    the scales that are filled up, and their bytes in that order.

    >>> scales = torch.arange(128 * 4, dtype=torch.int32).view(128, 4).to(torch.uint8)
    >>> tile = swizzled(scales).flatten()
    >>> tile[:8].tolist(), tile[16:20].tolist(), scales[32].tolist()
    ([0, 1, 2, 3, 128, 129, 130, 131], [4, 5, 6, 7], [128, 129, 130, 131])
    """
    rows, blocks = scales_MN.shape
    entire = functional.pad(scales_MN.view(torch.uint8), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = entire.view(-1, TILE_ROWS // LINES, LINES, entire.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(entire.shape).view(scales_MN.dtype)
