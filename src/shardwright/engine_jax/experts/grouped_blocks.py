"""Grouped products of rows with their experts' matrices, in a loop over blocks of rows.

R rows of a buffer, M embed, F hidden units, E experts of a device, P rows of a block; A and B the dims of a
matrix, X any width.

The loop ends with the last block that has a row of any expert.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.plan.expert_kernels import ExpertKernel
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.layers.gate import silu


class Matrices(NamedTuple):
    """The matrices of a device's experts, in the dtype of the rows."""

    gate_EMF: jax.Array
    up_EMF: jax.Array
    down_EFM: jax.Array


class Hidden(NamedTuple):
    """What the backward pass needs from the forward pass, in addition to its arguments."""

    gate_RF: jax.Array
    up_RF: jax.Array


def activated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """SwiGLU's hidden units (arXiv:2002.05202)."""
    return silu(gate) * up


def forward_in_blocks(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, kernel: ExpertKernel
) -> tuple[jax.Array, Hidden]:
    """``grouped_swiglu`` in blocks, RM, and what its backward pass needs."""
    R, M = rows_RM.shape
    F = experts.gate_EMF.shape[-1]
    blocks = Blocks.over(sizes_E, R, kernel.rows)

    def one_block(number: jax.Array, done):
        block = blocks.at(number)
        rows_PM = block.of(rows_RM)
        gate_PF, up_PF = rows_PM @ block.matrix(experts.gate_EMF), rows_PM @ block.matrix(experts.up_EMF)
        out_PM = activated(gate_PF, up_PF) @ block.matrix(experts.down_EFM)
        return tuple(block.put(new, old) for new, old in zip((out_PM, gate_PF, up_PF), done, strict=True))

    # Different fill values: XLA would make one array of equal buffers, and then copy it for each write.
    buffer_rows = tuple(jnp.full((R, width), number, rows_RM.dtype) for number, width in enumerate((M, F, F)))
    out_RM, gate_RF, up_RF = lax.fori_loop(0, blocks.number, one_block, buffer_rows)
    return out_RM, Hidden(gate_RF, up_RF)


def backward_in_blocks(
    rows_RM: jax.Array,
    experts: Matrices,
    sizes_E: jax.Array,
    hidden: Hidden,
    d_out_RM: jax.Array,
    kernel: ExpertKernel,
) -> tuple[jax.Array, Matrices]:
    """The gradients of the rows and of the matrices."""
    blocks = Blocks.over(sizes_E, rows_RM.shape[0], kernel.rows)

    def one_block(number: jax.Array, done: tuple[jax.Array, Matrices]):
        d_rows_RM, d_experts = done
        block = blocks.at(number)
        rows_PM, d_out_PM = block.own(block.of(rows_RM)), block.own(block.of(d_out_RM))
        hidden_PF, pull = jax.vjp(activated, block.of(hidden.gate_RF), block.of(hidden.up_RF))
        d_gate_PF, d_up_PF = pull(_by_transposed(d_out_PM, block.matrix(experts.down_EFM)))
        d_gate_PF, d_up_PF, hidden_PF = block.own(d_gate_PF), block.own(d_up_PF), block.own(hidden_PF)
        d_rows_PM = _by_transposed(d_gate_PF, block.matrix(experts.gate_EMF))
        d_rows_PM += _by_transposed(d_up_PF, block.matrix(experts.up_EMF))
        cotangents = ((rows_PM, d_gate_PF), (rows_PM, d_up_PF), (hidden_PF, d_out_PM))
        d_experts = Matrices(
            *(block.add(x, cotangent, to) for (x, cotangent), to in zip(cotangents, d_experts, strict=True))
        )
        return block.put(d_rows_PM, d_rows_RM), d_experts

    # Many blocks add to one matrix, hence a wider dtype.
    zeros = Matrices(*(jnp.zeros(matrix.shape, computed("gradient", matrix.dtype)) for matrix in experts))
    d_rows_RM, d_experts = lax.fori_loop(0, blocks.number, one_block, (lax.empty(rows_RM.shape, rows_RM.dtype), zeros))
    return d_rows_RM, Matrices(*(d.astype(matrix.dtype) for d, matrix in zip(d_experts, experts, strict=True)))


def _by_transposed(x_PA: jax.Array, matrix_BA: jax.Array) -> jax.Array:
    return lax.dot_general(x_PA, matrix_BA, (((1,), (1,)), ((), ())))


def _blocks_of(sizes_E: jax.Array, rows_of_block: int) -> jax.Array:
    return (sizes_E + rows_of_block - 1) // rows_of_block


class Block(NamedTuple):
    """P rows that begin at ``start``. ``owned_P1`` marks those of ``expert``."""

    expert: jax.Array
    start: jax.Array
    owned_P1: jax.Array

    def of(self, array_RX: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(array_RX, self.start, self.owned_P1.shape[0])

    def own(self, array_PX: jax.Array) -> jax.Array:
        """The rows of other experts set to zero. They are selected, not multiplied with zero: they may hold NaN."""
        return jnp.where(self.owned_P1, array_PX, 0)

    def put(self, array_PX: jax.Array, into_RX: jax.Array) -> jax.Array:
        array_PX = jnp.where(self.owned_P1, array_PX.astype(into_RX.dtype), self.of(into_RX))
        return lax.dynamic_update_slice_in_dim(into_RX, array_PX, self.start, 0)

    def matrix(self, matrices: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(matrices, self.expert, keepdims=False)

    def add(self, x_PA: jax.Array, cotangent_PB: jax.Array, sums_EAB: jax.Array) -> jax.Array:
        over_rows = (((0,), (0,)), ((), ()))
        product = lax.dot_general(x_PA, cotangent_PB, over_rows, preferred_element_type=sums_EAB.dtype)
        return lax.dynamic_update_index_in_dim(sums_EAB, self.matrix(sums_EAB) + product, self.expert, 0)


class Blocks(NamedTuple):
    """The blocks of a buffer in the order of their experts. Only blocks that have a row are numbered."""

    rows: int
    rows_of_block: int
    blocks_E: jax.Array
    stop_E: jax.Array
    sizes_E: jax.Array

    @staticmethod
    def over(sizes_E: jax.Array, rows: int, rows_of_block: int) -> Blocks:
        return Blocks(rows, rows_of_block, _blocks_of(sizes_E, rows_of_block), jnp.cumsum(sizes_E), sizes_E)

    @property
    def number(self) -> jax.Array:
        return jnp.sum(self.blocks_E)

    def at(self, number: jax.Array) -> Block:
        end_E = jnp.cumsum(self.blocks_E)
        expert = jnp.sum(number >= end_E, dtype=jnp.int32)
        stop, of_expert = self.stop_E[expert], number - (end_E - self.blocks_E)[expert]
        first = stop - self.sizes_E[expert] + of_expert * self.rows_of_block
        # A block that would exceed the buffer begins earlier.
        start = jnp.minimum(first, self.rows - self.rows_of_block)
        row_P = start + jnp.arange(self.rows_of_block, dtype=jnp.int32)
        return Block(expert, start, ((row_P >= first) & (row_P < stop))[:, None])
