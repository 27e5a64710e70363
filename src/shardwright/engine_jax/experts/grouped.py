"""The experts' grouped products: rows sorted by expert, each multiplied with the matrices of its own expert only.

R rows of a buffer, M embed, F hidden units, E experts of a device.

A row is never multiplied with an expert that it is not assigned to. ``core/plan/expert_kernels.py`` chooses one of two
implementations: a kernel (megablox, which JAX ships), or a loop over blocks of rows that ends with the last row of any expert
(``grouped_blocks.py``). ``lax.ragged_dot`` is not used: except on TPU, and even on TPU for a weight's gradient, compilers
make it multiply every row with every expert.

Floating-point operations in a compiled program: the loop has each product once, for one block, and runs
once for each block of rows that an expert has, a number that the program does not contain. The forward pass has three products,
the backward pass six, each with 2 x M x F operations a row.
"""

from __future__ import annotations

from functools import partial

import jax
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.plan.expert_kernels import ExpertKernel
from shardwright.engine_jax.experts.grouped_blocks import (
    Hidden,
    Matrices,
    activated,
    backward_in_blocks,
    forward_in_blocks,
)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def grouped_swiglu(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, kernel: ExpertKernel, names: tuple[str, str]
) -> jax.Array:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM.

    The first ``sizes_E[0]`` rows are expert 0's, and so on. Rows after the last expert's are arbitrary in the operand and in
    the result, and contribute to no gradient. ``names``: of what the backward pass reads besides, the products with gate and up.
    """
    return _forward(rows_RM, experts, sizes_E, kernel, names)[0]


def _forward(rows_RM, experts, sizes_E, kernel, names):
    forward = _forward_by_kernel if kernel.name == "megablox" else forward_in_blocks
    out_RM, (gate_RF, up_RF) = forward(rows_RM, experts, sizes_E, kernel)
    hidden = Hidden(checkpoint_name(gate_RF, names[0]), checkpoint_name(up_RF, names[1]))
    return out_RM, (rows_RM, experts, sizes_E, hidden)


def _backward(kernel, names, residuals, d_out_RM):
    del names
    backward = _backward_by_kernel if kernel.name == "megablox" else backward_in_blocks
    rows_RM, experts, sizes_E, hidden = residuals
    return *backward(rows_RM, experts, sizes_E, hidden, d_out_RM, kernel), None


grouped_swiglu.defvjp(_forward, _backward)


def _forward_by_kernel(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, kernel: ExpertKernel, *, interpret: bool = False
) -> tuple[jax.Array, Hidden]:
    product = partial(_product, sizes_E=sizes_E, tile=(kernel.rows, *kernel.tile), interpret=interpret)
    gate_RF, up_RF = product(rows_RM, experts.gate_EMF), product(rows_RM, experts.up_EMF)
    return product(activated(gate_RF, up_RF), experts.down_EFM), Hidden(gate_RF, up_RF)


def _backward_by_kernel(
    rows_RM: jax.Array,
    experts: Matrices,
    sizes_E: jax.Array,
    hidden: Hidden,
    d_out_RM: jax.Array,
    kernel: ExpertKernel,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Matrices]:
    tile = (kernel.rows, *kernel.tile)
    product_transposed = partial(_product, sizes_E=sizes_E, tile=tile, transposed=True, interpret=interpret)
    gradient_of_weight = partial(_gradient_of_weight, sizes_E=sizes_E, tile=tile, interpret=interpret)
    hidden_RF, pull = jax.vjp(activated, *hidden)
    d_gate_RF, d_up_RF = pull(product_transposed(d_out_RM, experts.down_EFM))
    d_rows_RM = product_transposed(d_gate_RF, experts.gate_EMF) + product_transposed(d_up_RF, experts.up_EMF)
    return d_rows_RM, Matrices(
        gradient_of_weight(rows_RM, d_gate_RF, experts.gate_EMF),
        gradient_of_weight(rows_RM, d_up_RF, experts.up_EMF),
        gradient_of_weight(hidden_RF, d_out_RM, experts.down_EFM),
    )


def _product(
    x: jax.Array,
    matrices: jax.Array,
    *,
    sizes_E: jax.Array,
    tile: tuple[int, int, int],
    transposed: bool = False,
    interpret: bool,
) -> jax.Array:
    # Imported here, because Pallas takes a while to load and only TPU needs it.
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    return gmm(x, matrices, sizes_E, x.dtype, tile, transpose_rhs=transposed, interpret=interpret)


def _gradient_of_weight(
    x: jax.Array,
    cotangent: jax.Array,
    matrices: jax.Array,
    *,
    sizes_E: jax.Array,
    tile: tuple[int, int, int],
    interpret: bool,
) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    return tgmm(x.swapaxes(0, 1), cotangent, sizes_E, matrices.dtype, tile, interpret=interpret)
