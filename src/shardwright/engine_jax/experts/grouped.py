"""The experts' products: rows sorted by expert, each multiplied with its own expert's matrices and no other's.

R rows of a buffer, M embed, F hidden units, E experts of a device.

Nowhere is a row multiplied with an expert that it did not choose. Which of two ways is taken, the core says
(``core/plan/expert_kernels.py``): a kernel (megablox, which JAX ships), or blocks of rows around a loop that ends with the last
row of some expert (``grouped_blocks.py``). ``lax.ragged_dot`` does neither: off TPU, and for a weight's gradient on TPU too,
its compilers multiply every row with every expert.

Floating-point operations, as they are read from a compiled program: in the loop each product stands once, for one block;
it runs ``num_blocks(sizes_E, products.rows)`` times, which is not written in the program. Forward has three products,
backward six, each 2 x M x F a row.
"""

from __future__ import annotations

from functools import partial

import jax

from shardwright.core.plan.expert_kernels import ExpertKernel
from shardwright.engine_jax.experts.grouped_blocks import Hidden, Matrices, activated, back_in_blocks, in_blocks


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_swiglu(rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, products: ExpertKernel) -> jax.Array:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM.

    The first ``sizes_E[0]`` rows are expert 0's, and so on. Rows after the last expert's hold anything, on both sides,
    and have no part in any gradient.
    """
    return _forward(rows_RM, experts, sizes_E, products)[0]


def _forward(rows_RM, experts, sizes_E, products):
    way = _by_kernel if products.name == "megablox" else in_blocks
    out_RM, hidden = way(rows_RM, experts, sizes_E, products)
    return out_RM, (rows_RM, experts, sizes_E, hidden)


def _backward(products, kept, d_out_RM):
    way = _back_by_kernel if products.name == "megablox" else back_in_blocks
    rows_RM, experts, sizes_E, hidden = kept
    return *way(rows_RM, experts, sizes_E, hidden, d_out_RM, products), None


grouped_swiglu.defvjp(_forward, _backward)


def _by_kernel(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, products: ExpertKernel, *, interpret: bool = False
) -> tuple[jax.Array, Hidden]:
    by = partial(_product, sizes_E=sizes_E, tile=(products.rows, *products.tile), interpret=interpret)
    gate_RF, up_RF = by(rows_RM, experts.gate_EMF), by(rows_RM, experts.up_EMF)
    return by(activated(gate_RF, up_RF), experts.down_EFM), Hidden(gate_RF, up_RF)


def _back_by_kernel(
    rows_RM: jax.Array,
    experts: Matrices,
    sizes_E: jax.Array,
    hidden: Hidden,
    d_out_RM: jax.Array,
    products: ExpertKernel,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, Matrices]:
    tile = (products.rows, *products.tile)
    by_transposed = partial(_product, sizes_E=sizes_E, tile=tile, transposed=True, interpret=interpret)
    of_weight = partial(_gradient_of_weight, sizes_E=sizes_E, tile=tile, interpret=interpret)
    hidden_RF, pull = jax.vjp(activated, *hidden)
    d_gate_RF, d_up_RF = pull(by_transposed(d_out_RM, experts.down_EFM))
    d_rows_RM = by_transposed(d_gate_RF, experts.gate_EMF) + by_transposed(d_up_RF, experts.up_EMF)
    return d_rows_RM, Matrices(
        of_weight(rows_RM, d_gate_RF, experts.gate_EMF),
        of_weight(rows_RM, d_up_RF, experts.up_EMF),
        of_weight(hidden_RF, d_out_RM, experts.down_EFM),
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
