"""The experts' products: rows sorted by expert, each multiplied with its own expert's matrices and no other's.

R rows of a buffer, M embed, F hidden units, E experts of a device.

Nowhere is a row multiplied with an expert that it did not choose, and what is computed follows the tokens that came, not
the room that is kept for them. On TPU a kernel does it (megablox, which JAX ships); elsewhere blocks of rows go around a
loop that ends with the last row of some expert (``grouped_blocks.py``). ``lax.ragged_dot`` does neither: off TPU, and for a
weight's gradient on TPU too, its compilers multiply every row with every expert.

Floating-point operations, as they are read from a compiled program: in the loop each product stands once, for one block;
it runs ``num_blocks(sizes_E, rows_of_block)`` times, which is not written in the program. Forward has three products,
backward six, each 2 x M x F a row.
"""

from __future__ import annotations

from functools import partial
from math import gcd

import jax
from jax import lax

from shardwright.engine_jax.grouped_blocks import Hidden, Matrices, activated, back_in_blocks, in_blocks

CPU_BLOCK, GPU_BLOCK = 64, 512
"""Rows of a block at most: on CPU a product of fewer than 32 rows leaves its vector units waiting for the matrix, and of
the last block of each expert half is padding; a GPU wants some hundred rows to be busy for as long as a matrix takes to
come from memory."""
KERNEL_TILE_BYTES = (1024, 2048, 2048)
"""Rows, contracted and resulting elements of one tile of TPU's kernel, times the bytes of one: in bfloat16 512 rows of
1,024, of which the tiles that are read, added up and written take 13 of the 16 MB that a kernel may have."""
LEAST_KERNEL_ROWS = 128
"""The kernel's tiles of rows must divide the buffer; where they would be smaller than the matrix unit, blocks are used."""


@jax.custom_vjp
def grouped_swiglu(rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array) -> jax.Array:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM.

    The first ``sizes_E[0]`` rows are expert 0's, and so on. Rows after the last expert's hold anything, on both sides,
    and have no part in any gradient.
    """
    return _forward(rows_RM, experts, sizes_E)[0]


def _forward(rows_RM, experts, sizes_E):
    tpu = _by_kernel if _kernel_rows(rows_RM) else partial(in_blocks, largest=GPU_BLOCK)
    out_RM, hidden = lax.platform_dependent(
        rows_RM,
        experts,
        sizes_E,
        cpu=partial(in_blocks, largest=CPU_BLOCK),
        tpu=tpu,
        default=partial(in_blocks, largest=GPU_BLOCK),
    )
    return out_RM, (rows_RM, experts, sizes_E, hidden)


def _backward(kept, d_out_RM):
    tpu = _back_by_kernel if _kernel_rows(d_out_RM) else partial(back_in_blocks, largest=GPU_BLOCK)
    d_rows_RM, d_experts = lax.platform_dependent(
        *kept,
        d_out_RM,
        cpu=partial(back_in_blocks, largest=CPU_BLOCK),
        tpu=tpu,
        default=partial(back_in_blocks, largest=GPU_BLOCK),
    )
    return d_rows_RM, d_experts, None


grouped_swiglu.defvjp(_forward, _backward)


def _kernel_rows(rows_RM: jax.Array) -> int:
    """Rows of one tile of the kernel; 0 where it cannot be used."""
    rows = gcd(rows_RM.shape[0], KERNEL_TILE_BYTES[0] // rows_RM.dtype.itemsize)
    return rows if rows >= LEAST_KERNEL_ROWS else 0


def _tile(rows_RM: jax.Array) -> tuple[int, int, int]:
    _, contracted, resulting = (size // rows_RM.dtype.itemsize for size in KERNEL_TILE_BYTES)
    return _kernel_rows(rows_RM), contracted, resulting


def _by_kernel(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, *, interpret: bool = False
) -> tuple[jax.Array, Hidden]:
    by = partial(_product, sizes_E=sizes_E, interpret=interpret)
    gate_RF, up_RF = by(rows_RM, experts.gate_EMF), by(rows_RM, experts.up_EMF)
    return by(activated(gate_RF, up_RF), experts.down_EFM), Hidden(gate_RF, up_RF)


def _back_by_kernel(
    rows_RM: jax.Array,
    experts: Matrices,
    sizes_E: jax.Array,
    hidden: Hidden,
    d_out_RM: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Matrices]:
    by_transposed = partial(_product, sizes_E=sizes_E, transposed=True, interpret=interpret)
    of_weight = partial(_slope_of_weight, sizes_E=sizes_E, interpret=interpret)
    hidden_RF, pull = jax.vjp(activated, *hidden)
    d_gate_RF, d_up_RF = pull(by_transposed(d_out_RM, experts.down_EFM))
    d_rows_RM = by_transposed(d_gate_RF, experts.gate_EMF) + by_transposed(d_up_RF, experts.up_EMF)
    return d_rows_RM, Matrices(
        of_weight(rows_RM, d_gate_RF, experts.gate_EMF),
        of_weight(rows_RM, d_up_RF, experts.up_EMF),
        of_weight(hidden_RF, d_out_RM, experts.down_EFM),
    )


def _product(x: jax.Array, matrices: jax.Array, *, sizes_E, transposed: bool = False, interpret: bool) -> jax.Array:
    # Imported here, because Pallas takes a while to load and only TPU needs it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return gmm(x, matrices, sizes_E, x.dtype, _tile(x), transpose_rhs=transposed, interpret=interpret)


def _slope_of_weight(x: jax.Array, slope: jax.Array, matrices: jax.Array, *, sizes_E, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return tgmm(x.swapaxes(0, 1), slope, sizes_E, matrices.dtype, _tile(x), interpret=interpret)
