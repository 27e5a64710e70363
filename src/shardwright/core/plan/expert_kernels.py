"""By which algorithm a device multiplies each row with the matrices of its own expert, and with no other's.

| way | engine | where | what it is |
|---|---|---|---|
| megablox | JAX | TPU | JAX's Pallas kernel; its tiles of rows divide the buffer |
| blocks | JAX | everywhere | a loop over blocks of rows, which ends with the last row of some expert |
| grouped_mm | PyTorch | NVIDIA | PyTorch's grouped product, one kernel for all experts |
| in turn | PyTorch | everywhere | an ordinary product for each expert |

What is computed follows the rows that came, not the buffer that is kept for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from shardwright.core.model.table import DTYPE_BYTES
from shardwright.core.plan.attention_kernels import Backend

CPU_BLOCK, ACCELERATOR_BLOCK = 64, 512
"""Rows of a block at most: on CPU a product of fewer than 32 rows leaves its vector units waiting for the matrix, and of
the last block of each expert half is padding; a GPU wants some hundred rows to be busy for as long as a matrix takes to
come from memory."""

SMALLEST_BLOCK = 8
"""Rows of the smallest block, but for a buffer that is smaller."""

KERNEL_TILE_BYTES = (1024, 2048, 2048)
"""Rows, contracted and resulting elements of one tile of TPU's kernel, times the bytes of one: in bfloat16 512 rows of
1,024, of which the tiles that are read, added up and written take 13 of the 16 MB that a kernel may have."""

LEAST_KERNEL_ROWS = 128
"""The kernel's tiles of rows must divide the buffer; where they would be smaller than the matrix unit, blocks are used."""

ALIGNED_BYTES = 16
"""What PyTorch's grouped product wants a row of either operand to be a multiple of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertKernel:
    """The way that JAX takes. ``rows``: of a tile or of a block. ``tile``: elements of one that are summed, and made."""

    name: Literal["megablox", "blocks"]
    rows: int
    tile: tuple[int, int] = (0, 0)


def choose_expert_kernel(backend: Backend, *, buffer_rows: int, experts: int, dtype: str) -> ExpertKernel:
    """How a device with a buffer of so many rows and so many experts multiplies them, in JAX.

    A block is a quarter of an expert's even share: a buffer that can hold whatever may come is several times as large as
    what comes.

    >>> choose_expert_kernel("tpu", buffer_rows=4096, experts=8, dtype="bfloat16")
    ExpertKernel(name='megablox', rows=512, tile=(1024, 1024))
    >>> [choose_expert_kernel("tpu", buffer_rows=rows, experts=4, dtype="float32").name for rows in (128, 129)]
    ['megablox', 'blocks']
    >>> [choose_expert_kernel("cpu", buffer_rows=rows, experts=4, dtype="float32").rows for rows in (2048, 96, 4)]
    [64, 8, 4]
    """
    width = DTYPE_BYTES[dtype]
    rows, summed, made = (size // width for size in KERNEL_TILE_BYTES)
    tile_rows = gcd(buffer_rows, rows)
    if backend == "tpu" and tile_rows >= LEAST_KERNEL_ROWS:
        return ExpertKernel(name="megablox", rows=tile_rows, tile=(summed, made))
    wanted = max(SMALLEST_BLOCK, buffer_rows // (4 * experts))
    largest = CPU_BLOCK if backend == "cpu" else ACCELERATOR_BLOCK
    return ExpertKernel(name="blocks", rows=min(buffer_rows, largest, 1 << (wanted.bit_length() - 1)))


def has_grouped_mm(row_bytes: int, *, on_gpu: bool) -> bool:
    """Whether PyTorch multiplies all experts' rows in one kernel, ``row_bytes`` being those of a row of either operand.

    >>> has_grouped_mm(128, on_gpu=True), has_grouped_mm(12, on_gpu=True), has_grouped_mm(128, on_gpu=False)
    (True, False, False)
    """
    return on_gpu and row_bytes % ALIGNED_BYTES == 0
