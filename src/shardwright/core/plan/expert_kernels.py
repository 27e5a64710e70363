"""Which kernel multiplies each row with the matrices of its own expert, and with no other's.

| kernel | engine | where | what it is |
|---|---|---|---|
| megablox | JAX | TPU | JAX's Pallas kernel; its tiles of rows divide the buffer |
| blocks | JAX | everywhere | a loop over blocks of rows, which ends with the last row of some expert |
| grouped_mm | PyTorch | NVIDIA | PyTorch's grouped matrix product, one kernel for all experts |
| one by one | PyTorch | everywhere | an ordinary matrix product for each expert |

The work is proportional to the rows that are received, not to the capacity of their buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.attention_kernels import Backend

CPU_BLOCK, ACCELERATOR_BLOCK = 64, 512
"""The most rows of a block. On CPU a product of fewer than 32 rows waits for the matrix to be read, and half of the last
block of each expert is padding. A GPU needs some hundred rows for a product to take as long as reading its matrix from
memory."""

SMALLEST_BLOCK = 8
"""Rows of the smallest block, unless the buffer is smaller."""

KERNEL_TILE_BYTES = (1024, 2048, 2048)
"""Rows, contracted elements and output elements of one tile of the TPU kernel, times the bytes of one element. In bfloat16 a
tile has 512 rows of 1,024; the tiles that are read, accumulated and written take 13 of the 16 MB that a kernel may use."""

LEAST_KERNEL_ROWS = 128
"""The kernel's tiles of rows must divide the buffer. Where they would be smaller than the matrix unit, blocks are used."""

ALIGNED_BYTES = 16
"""The bytes of a row of either operand must be a multiple of it in PyTorch's grouped product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """The kernel that JAX uses. ``rows``: of a tile or a block. ``tile``: contracted and output elements of a tile."""

    name: Literal["megablox", "blocks"]
    rows: int
    tile: tuple[int, int] = (0, 0)


def choose_expert_kernel(backend: Backend, *, buffer_rows: int, experts: int, dtype: str) -> ExpertKernel:
    """The JAX kernel of a device with so many experts and a buffer of so many rows.

    A block is a quarter of an expert's even share of the buffer, since a buffer with capacity for the worst case is several
    times as large as what is received.

    >>> choose_expert_kernel("tpu", buffer_rows=4096, experts=8, dtype="bfloat16")
    ExpertKernel(name='megablox', rows=512, tile=(1024, 1024))
    >>> [choose_expert_kernel("tpu", buffer_rows=rows, experts=4, dtype="float32").name for rows in (128, 129)]
    ['megablox', 'blocks']
    >>> [choose_expert_kernel("cpu", buffer_rows=rows, experts=4, dtype="float32").rows for rows in (2048, 96, 4)]
    [64, 8, 4]
    """
    width = DTYPE_BYTES[dtype]
    rows, contracted, output = (size // width for size in KERNEL_TILE_BYTES)
    tile_rows = gcd(buffer_rows, rows)
    if backend == "tpu" and tile_rows >= LEAST_KERNEL_ROWS:
        return ExpertKernel(name="megablox", rows=tile_rows, tile=(contracted, output))
    wanted = max(SMALLEST_BLOCK, buffer_rows // (4 * experts))
    largest = CPU_BLOCK if backend == "cpu" else ACCELERATOR_BLOCK
    return ExpertKernel(name="blocks", rows=min(buffer_rows, largest, 1 << (wanted.bit_length() - 1)))


def has_grouped_mm(row_bytes: int, *, on_gpu: bool) -> bool:
    """Whether PyTorch multiplies all experts' rows in one kernel. ``row_bytes``: bytes of a row of either operand.

    >>> has_grouped_mm(128, on_gpu=True), has_grouped_mm(12, on_gpu=True), has_grouped_mm(128, on_gpu=False)
    (True, False, False)
    """
    return on_gpu and row_bytes % ALIGNED_BYTES == 0
