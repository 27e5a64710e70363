"""The experts' products: rows sorted by expert, each multiplied with its own expert's matrices and no other's.

R rows of a buffer, M embed, F hidden units, E experts of a device, P rows of a block.

Where the backend has grouped products (``lax.ragged_dot``) they are used. On CPU that operation multiplies every row
with every expert, so there blocks of P rows go around a loop, which ends with the last block that holds a row of some
expert: what is computed follows the tokens that came, not the room that is kept for them.

Floating-point operations, as they are read from a compiled program: a grouped product of R rows has those of R rows of
one matrix, of which the rows that no expert owns cost nothing. In the loop on CPU each product stands once, for P rows;
it runs ``num_blocks(sizes_E, P)`` times, which is not written in the program. Forward has three products, backward six,
each 2 x M x F a row.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

LARGEST_BLOCK, SMALLEST_BLOCK = 64, 8
"""Rows of a block on CPU: a product of fewer than 32 rows leaves its vector units waiting for the matrix, and of the
last block of each expert half is padding."""


class Matrices(NamedTuple):
    """The matrices of a device's experts, in the dtype of the rows."""

    gate_EMF: jax.Array
    up_EMF: jax.Array
    down_EFM: jax.Array


class Hidden(NamedTuple):
    """What the backward pass needs of the forward pass, beside its arguments."""

    gate_RF: jax.Array
    up_RF: jax.Array


@jax.custom_vjp
def grouped_swiglu(rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array) -> jax.Array:
    """``down(silu(gate(row)) * up(row))`` of each row by its own expert, RM.

    The first ``sizes_E[0]`` rows are expert 0's, and so on. Rows after the last expert's hold anything, on both sides,
    and have no part in any gradient.
    """
    return lax.platform_dependent(rows_RM, experts, sizes_E, cpu=_in_blocks, default=_ragged)[0]


def num_blocks(sizes_E: jax.Array, rows_of_block: int) -> jax.Array:
    """How often the loop on CPU runs, int32: each expert's rows are rounded up to blocks.

    >>> int(num_blocks(jnp.asarray([3, 0, 9]), 8))
    3
    """
    return jnp.sum(_blocks_of(sizes_E, rows_of_block), dtype=jnp.int32)


def block_rows(rows: int, experts: int) -> int:
    """Rows of a block for a buffer of so many: a quarter of an expert's even share, between 8 and 64.

    A buffer that can hold whatever may come is several times as large as what comes.

    >>> block_rows(2048, 4), block_rows(96, 4), block_rows(4, 4)
    (64, 8, 4)
    """
    wanted = max(SMALLEST_BLOCK, rows // (4 * experts))
    return min(rows, LARGEST_BLOCK, 1 << (wanted.bit_length() - 1))


def _forward(rows_RM, experts, sizes_E):
    out_RM, hidden = lax.platform_dependent(rows_RM, experts, sizes_E, cpu=_in_blocks, default=_ragged)
    return out_RM, (rows_RM, experts, sizes_E, hidden)


def _backward(kept, d_out_RM):
    d_rows_RM, d_experts = lax.platform_dependent(*kept, d_out_RM, cpu=_back_in_blocks, default=_back_ragged)
    return d_rows_RM, d_experts, None


grouped_swiglu.defvjp(_forward, _backward)


def _activated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _ragged(rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array) -> tuple[jax.Array, Hidden]:
    gate_RF = lax.ragged_dot(rows_RM, experts.gate_EMF, sizes_E)
    up_RF = lax.ragged_dot(rows_RM, experts.up_EMF, sizes_E)
    return lax.ragged_dot(_activated(gate_RF, up_RF), experts.down_EFM, sizes_E), Hidden(gate_RF, up_RF)


def _back_ragged(rows_RM, experts: Matrices, sizes_E, hidden: Hidden, d_out_RM) -> tuple[jax.Array, Matrices]:
    def by_transposed(x: jax.Array, matrices: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, matrices.swapaxes(1, 2), sizes_E)

    over_rows = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=(0,), rhs_group_dimensions=()
    )

    def of_weight(x: jax.Array, slope: jax.Array) -> jax.Array:
        return lax.ragged_dot_general(x, slope, sizes_E, over_rows)

    hidden_RF, pull = jax.vjp(_activated, *hidden)
    d_gate_RF, d_up_RF = pull(by_transposed(d_out_RM, experts.down_EFM))
    d_rows_RM = by_transposed(d_gate_RF, experts.gate_EMF) + by_transposed(d_up_RF, experts.up_EMF)
    return d_rows_RM, Matrices(
        of_weight(rows_RM, d_gate_RF), of_weight(rows_RM, d_up_RF), of_weight(hidden_RF, d_out_RM)
    )


def _in_blocks(rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array) -> tuple[jax.Array, Hidden]:
    R, M = rows_RM.shape
    F = experts.gate_EMF.shape[-1]
    blocks = _Blocks.over(sizes_E, R)

    def one_block(number: jax.Array, done):
        block = blocks.at(number)
        rows_PM = block.of(rows_RM)
        gate_PF, up_PF = rows_PM @ block.matrix(experts.gate_EMF), rows_PM @ block.matrix(experts.up_EMF)
        out_PM = _activated(gate_PF, up_PF) @ block.matrix(experts.down_EFM)
        return tuple(block.put(new, old) for new, old in zip((out_PM, gate_PF, up_PF), done, strict=True))

    # Unlike numbers, because XLA makes one array of equal ones, and then copies of it to write to.
    room = tuple(jnp.full((R, width), number, rows_RM.dtype) for number, width in enumerate((M, F, F)))
    out_RM, gate_RF, up_RF = lax.fori_loop(0, blocks.number, one_block, room)
    return out_RM, Hidden(gate_RF, up_RF)


def _back_in_blocks(rows_RM, experts: Matrices, sizes_E, hidden: Hidden, d_out_RM) -> tuple[jax.Array, Matrices]:
    blocks = _Blocks.over(sizes_E, rows_RM.shape[0])

    def one_block(number: jax.Array, done: tuple[jax.Array, Matrices]):
        d_rows_RM, d_experts = done
        block = blocks.at(number)
        rows_PM, d_out_PM = block.own(block.of(rows_RM)), block.own(block.of(d_out_RM))
        hidden_PF, pull = jax.vjp(_activated, block.of(hidden.gate_RF), block.of(hidden.up_RF))
        d_gate_PF, d_up_PF = pull(_by_transposed(d_out_PM, block.matrix(experts.down_EFM)))
        d_gate_PF, d_up_PF, hidden_PF = block.own(d_gate_PF), block.own(d_up_PF), block.own(hidden_PF)
        d_rows_PM = _by_transposed(d_gate_PF, block.matrix(experts.gate_EMF))
        d_rows_PM += _by_transposed(d_up_PF, block.matrix(experts.up_EMF))
        slopes = ((rows_PM, d_gate_PF), (rows_PM, d_up_PF), (hidden_PF, d_out_PM))
        d_experts = Matrices(*(block.add(x, slope, to) for (x, slope), to in zip(slopes, d_experts, strict=True)))
        return block.put(d_rows_PM, d_rows_RM), d_experts

    # Many blocks add to one matrix: the sum is kept in float32.
    zeros = Matrices(*(jnp.zeros(matrix.shape, jnp.float32) for matrix in experts))
    d_rows_RM, d_experts = lax.fori_loop(0, blocks.number, one_block, (lax.empty(rows_RM.shape, rows_RM.dtype), zeros))
    return d_rows_RM, Matrices(*(d.astype(matrix.dtype) for d, matrix in zip(d_experts, experts, strict=True)))


def _by_transposed(x_PA: jax.Array, matrix_BA: jax.Array) -> jax.Array:
    return lax.dot_general(x_PA, matrix_BA, (((1,), (1,)), ((), ())))


def _blocks_of(sizes_E: jax.Array, rows_of_block: int) -> jax.Array:
    return (sizes_E + rows_of_block - 1) // rows_of_block


class _Block(NamedTuple):
    """P rows that begin at ``start``, of which one expert owns those that ``owned_P1`` marks."""

    expert: jax.Array
    start: jax.Array
    owned_P1: jax.Array

    def of(self, array_RX: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array_RX, self.start, self.owned_P1.shape[0])

    def own(self, array_PX: jax.Array) -> jax.Array:
        """Zeros in the rows of others: not times zero, for they may hold anything."""
        return jnp.where(self.owned_P1, array_PX, 0)

    def put(self, array_PX: jax.Array, into_RX: jax.Array) -> jax.Array:
        array_PX = jnp.where(self.owned_P1, array_PX.astype(into_RX.dtype), self.of(into_RX))
        return lax.dynamic_update_slice_in_dim(into_RX, array_PX, self.start, 0)

    def matrix(self, matrices: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(matrices, self.expert, keepdims=False)

    def add(self, x_PA: jax.Array, slope_PB: jax.Array, sums_EAB: jax.Array) -> jax.Array:
        over_rows = (((0,), (0,)), ((), ()))
        product = lax.dot_general(x_PA, slope_PB, over_rows, preferred_element_type=sums_EAB.dtype)
        return lax.dynamic_update_index_in_dim(sums_EAB, self.matrix(sums_EAB) + product, self.expert, 0)


class _Blocks(NamedTuple):
    """The blocks of a buffer in the order of their experts; only those that hold a row are numbered."""

    rows: int
    rows_of_block: int
    blocks_E: jax.Array
    stop_E: jax.Array
    sizes_E: jax.Array

    @staticmethod
    def over(sizes_E: jax.Array, rows: int) -> _Blocks:
        rows_of_block = block_rows(rows, sizes_E.shape[0])
        return _Blocks(rows, rows_of_block, _blocks_of(sizes_E, rows_of_block), jnp.cumsum(sizes_E), sizes_E)

    @property
    def number(self) -> jax.Array:
        return jnp.sum(self.blocks_E)

    def at(self, number: jax.Array) -> _Block:
        end_E = jnp.cumsum(self.blocks_E)
        expert = jnp.sum(number >= end_E, dtype=jnp.int32)
        stop, of_expert = self.stop_E[expert], number - (end_E - self.blocks_E)[expert]
        first = stop - self.sizes_E[expert] + of_expert * self.rows_of_block
        # The last block begins earlier where the buffer ends before it does.
        start = jnp.minimum(first, self.rows - self.rows_of_block)
        row_P = start + jnp.arange(self.rows_of_block, dtype=jnp.int32)
        return _Block(expert, start, ((row_P >= first) & (row_P < stop))[:, None])
