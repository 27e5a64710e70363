"""The rate that a product of matrices reaches on a chip, by its shape, and that of attention.

| chip | a product of m x k and k x n reaches |
|---|---|
| GPU | the highest measured rate x (elements of the output / elements of the tiles that all multiprocessors compute in whole waves) |
| TPU | the highest measured rate x (k x n / k x n rounded up to the side of the matrix unit) |
| both | not more than the rate at which memory delivers the three matrices |

A GPU computes an output in tiles of 128 x 256, one for each multiprocessor at a time: of a wave that is not full the rest is idle
(NVIDIA, Matrix Multiplication Background User's Guide). A TPU pads the matrix that its unit holds (How To Scale Your Model, chapter
TPUs). Where no measurement is known, the highest rate is the chip's full rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.recipes.recipe import Product
from shardwright.cost.hardware.chips import ChipNumbers, Reading

RATES: Mapping[str, str] = {
    "float4": "fp4_flops_per_s",
    "float8": "fp8_flops_per_s",
    "bfloat16": "bf16_flops_per_s",
    "float32": "fp32_flops_per_s",
}
"""The number of a chip that is the rate of a kernel. ``float32`` multiplies all bits, unlike products in float32 by default."""

TILE = (128, 256)
"""Elements of the output that one multiprocessor computes at a time, in the fastest kernels of cuBLAS."""

WIDTHS: Mapping[str, float] = {"float4": 0.5, "float8": 1.0, "bfloat16": 2.0, "float32": 4.0}
"""Bytes of an operand in the dtype of a rate."""


class Shape(NamedTuple):
    """A product of m x k and k x n on one device."""

    m: float
    k: int
    n: int

    def of(self, product: Product) -> Shape:
        """The shape of each product of a linear layer with this forward product: tokens m, input k, output n."""
        m, k, n = self
        if product == "input_gradient":
            return Shape(m, n, k)
        return Shape(k, ceil(m), n) if product == "weight_gradient" else self


def highest_flops_per_s(chip: ChipNumbers, rate: str, reading: Reading) -> float:
    """The highest rate that was measured of products in a dtype of ``RATES``, or the full rate; float32's is its full rate.

    Raises KeyError if no source was checked for either.
    """
    measured = f"product_{RATES[rate]}"
    full = chip.read(RATES[rate], reading)
    return min(full, chip.read(measured, reading)) if measured in chip.numbers else full


def share_of_highest(chip: ChipNumbers, shape: Shape) -> float:
    """What a product of this shape reaches of the highest rate.

    >>> from shardwright.cost.hardware.chips import chip_of
    >>> share_of_highest(chip_of("h100"), Shape(16384, 4096, 4096)), share_of_highest(chip_of("v6e"), Shape(8192, 4096, 192))
    (0.96969..., 0.75)
    """
    if chip.network == "torus":
        side = chip.integer("matrix_unit_side")
        return shape.k / _up(shape.k, side) * shape.n / _up(shape.n, side)
    if "multiprocessors" not in chip.numbers:
        return 1.0
    tiles = ceil(shape.m / TILE[0]) * ceil(shape.n / TILE[1])
    count = chip.integer("multiprocessors")
    filled = shape.m * shape.n / (TILE[0] * TILE[1])
    # A product of few tiles splits the contracted dim over the multiprocessors that would be idle.
    waves = tiles / count if tiles < count else ceil(tiles / count)
    return min(1.0, filled / (waves * count))


@lru_cache(maxsize=16384)
def product_seconds(chip: ChipNumbers, flops: float, shape: Shape, rate: str, reading: Reading) -> float:
    """Seconds of one or more products of a shape: ``flops`` in all."""
    if not flops:
        return 0.0
    reached = highest_flops_per_s(chip, rate, reading) * share_of_highest(chip, shape)
    width = WIDTHS[rate]
    moved = width * (shape.m * shape.k + shape.k * shape.n) + DTYPE_BYTES["bfloat16"] * shape.m * shape.n
    times = flops / max(1.0, 2 * shape.m * shape.k * shape.n)
    return max(flops / reached, times * moved / copy_bytes_per_s(chip, reading))


def copy_bytes_per_s(chip: ChipNumbers, reading: Reading) -> float:
    """The rate of passes over memory, as measured, or that of the data sheet."""
    full = chip.read("hbm_bytes_per_s", reading)
    return min(full, chip.read("copy_bytes_per_s", reading)) if "copy_bytes_per_s" in chip.numbers else full


def attention_flops_per_s(chip: ChipNumbers, engine: str, direction: str, dtype: str, reading: Reading) -> float:
    """The rate of attention, ``forward`` or ``backward``. Without a measurement it is that of products."""
    names = (f"{engine}_attention_{direction}_flops_per_s", f"attention_{direction}_flops_per_s")
    known = [chip.read(name, reading) for name in names if name in chip.numbers]
    share = chip.read("float32_share_of_bf16", reading) if dtype == "float32" else 1.0
    return share * (known[0] if known else highest_flops_per_s(chip, "bfloat16", reading))


def _up(size: int, multiple: int) -> int:
    return ceil(size / multiple) * multiple
