"""The experts' grouped products with quantized operands: each expert's rows are an operand of their own, as its matrix is.

R rows of a buffer, E experts of a device, M embed, F hidden units; I and O the input and output widths of a matrix, X any width,
P rows of a block.

Blocks over rows, which a matrix's gradient has, begin with the first row of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formula import Shares, dequantize, quantize, shared_by
from shardwright.core.recipes.recipe import ENTIRE, OPERANDS, PER_TENSOR, Product, Quantizer
from shardwright.engine_jax.experts.grouped_blocks import Blocks, Matrices, activated
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import LowPrecision
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.operands import values

HIGH = LowPrecision(quantizers={})


def quantized_swiglu(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, block_rows: int, low: Mapping[str, LowPrecision]
) -> jax.Array:
    """``grouped_swiglu`` of operands that are quantized as ``low`` says, by ``moe.gate``, ``moe.up`` and ``moe.down``."""

    def product(x: jax.Array, matrices: jax.Array, name: str) -> jax.Array:
        return quantized_grouped_product(x, matrices, sizes_E, block_rows, low.get(f"moe.{name}", HIGH))

    gate_RF, up_RF = product(rows_RM, experts.gate_EMF, "gate"), product(rows_RM, experts.up_EMF, "up")
    return product(activated(gate_RF, up_RF), experts.down_EFM, "down")


def quantized_grouped_product(
    x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array, block_rows: int, low: LowPrecision
) -> jax.Array:
    """Each row times the matrix of its own expert, RO, and the two products of the backward pass."""

    @jax.custom_vjp
    def product(x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
        x, matrices = _operands("output", low, x_RI, matrices_EIO.swapaxes(1, 2), _Rows.of(x_RI, sizes_E))
        return _by_own_matrix(x, matrices, sizes_E, block_rows).astype(x_RI.dtype)

    def backward(saved: tuple[jax.Array, jax.Array, jax.Array], d_RO: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        x_RI, matrices_EIO, sizes_E = saved
        rows, d_RO = _Rows.of(x_RI, sizes_E), d_RO.astype(x_RI.dtype)
        d, matrices = _operands("input_gradient", low, d_RO, matrices_EIO, rows)
        d_x_RI = _by_own_matrix(d, matrices, sizes_E, block_rows).astype(x_RI.dtype)
        x, d = _operands("weight_gradient", low, x_RI, d_RO, rows)
        return d_x_RI, _over_own_rows(x, d, sizes_E, block_rows).astype(matrices_EIO.dtype), None

    product.defvjp(lambda *given: (product(*given), given), backward)
    return product(x_RI, matrices_EIO, sizes_E)


class _Rows(NamedTuple):
    """The expert of each row, E where it has none, the row's number among those of its expert, and the number of experts."""

    expert_R: jax.Array
    number_R: jax.Array
    experts: int

    @classmethod
    def of(cls, x_RX: jax.Array, sizes_E: jax.Array) -> _Rows:
        end_E = jnp.cumsum(sizes_E)
        row_R = jnp.arange(x_RX.shape[0], dtype=jnp.int32)
        expert_R = jnp.sum(row_R[:, None] >= end_E[None], axis=1, dtype=jnp.int32)
        start_E = jnp.append(end_E - sizes_E, end_E[-1])
        return cls(expert_R, row_R - start_E[expert_R], sizes_E.shape[0])

    def largest(self, amax_RX: jax.Array, rows: int | None) -> jax.Array:
        """For each row, the largest amax of the rows of its block of so many rows; of ``ENTIRE``: of all of its expert."""
        of_block = rows or max(1, amax_RX.shape[0])
        blocks = -(-amax_RX.shape[0] // of_block)
        block_R = self.expert_R * blocks + self.number_R // of_block
        return jax.ops.segment_max(amax_RX, block_R, (self.experts + 1) * blocks)[block_R]


def _operands(name: Product, low: LowPrecision, x: jax.Array, y: jax.Array, rows: _Rows) -> tuple[jax.Array, jax.Array]:
    """Both operands of a product as they are multiplied: ``x`` of rows, ``y`` of rows or of matrices, whose contracted dim is last."""
    quantizers = [low.quantizers.get((name, operand)) for operand in OPERANDS[name]]
    found = []
    for operand, array, quantizer in zip(OPERANDS[name], (x, y), quantizers, strict=True):
        if quantizer is None:
            found.append(array)
            continue
        axes = low.amax_axes.get((name, operand), ())
        if array.ndim == 3:
            narrow = values(array, quantizer, axes)
        elif name == "weight_gradient":
            narrow = _along_rows(array, quantizer, axes, rows)
        else:
            narrow = _of_rows(array, quantizer, axes, rows)
        found.append(narrow if None not in quantizers else narrow.astype(array.dtype))
    return found[0], found[1]


def _of_rows(x_RX: jax.Array, quantizer: Quantizer, axes: tuple[str, ...], rows: _Rows) -> jax.Array:
    """Rows whose last dim is contracted. Each is an operand of its own, but for scales of all rows of an expert."""

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        if of == shared_by(quantizer):
            if quantizer.of_tensor:
                amax = rows.largest(amax, ENTIRE)
            amax = lax.pmax(amax, axes) if axes else amax
        return amax

    shape = (x_RX.shape[0], 1, x_RX.shape[1])
    codes = quantize(x_RX.reshape(shape), quantizer, ARRAYS, agree=agree)
    return dequantize(codes, shape, quantizer, ARRAYS).reshape(x_RX.shape)


def _along_rows(x_RX: jax.Array, quantizer: Quantizer, axes: tuple[str, ...], rows: _Rows) -> jax.Array:
    """Rows that are themselves contracted. Each element is an operand of its own, which agrees with the others of its block."""
    assert quantizer.hadamard is None, quantizer
    assert quantizer.block.other in (1, ENTIRE), quantizer.block

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        of_tensor = of == "tensor" or quantizer.block == PER_TENSOR
        amax = rows.largest(amax, ENTIRE if of_tensor else quantizer.block.contracted)
        if of_tensor:
            amax = jnp.broadcast_to(jnp.max(amax, axis=1, keepdims=True), amax.shape)
        return lax.pmax(amax, axes) if axes and of == shared_by(quantizer) else amax

    shape, alone = (*x_RX.shape, 1, 1), replace(quantizer, block=PER_TENSOR)
    codes = quantize(x_RX.reshape(shape), alone, ARRAYS, agree=agree)
    return dequantize(codes, shape, alone, ARRAYS).reshape(x_RX.shape)


def _by_own_matrix(x_RI: jax.Array, matrices_EOI: jax.Array, sizes_E: jax.Array, block_rows: int) -> jax.Array:
    """Rows times the transposed matrices of their experts, RO in float32. Rows of no expert are 0."""
    blocks = Blocks.over(sizes_E, x_RI.shape[0], block_rows)

    def one_block(number: jax.Array, done_RO: jax.Array) -> jax.Array:
        block = blocks.at(number)
        out_PO = lax.dot_general(
            block.of(x_RI),
            block.matrix(matrices_EOI),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=done_RO.dtype,
        )
        return block.put(out_PO, done_RO)

    zeros_RO = jnp.zeros((x_RI.shape[0], matrices_EOI.shape[1]), jnp.float32)
    return lax.fori_loop(0, blocks.number, one_block, zeros_RO)


def _over_own_rows(x_RI: jax.Array, d_RO: jax.Array, sizes_E: jax.Array, block_rows: int) -> jax.Array:
    """The product of both over the rows of each expert, EIO."""
    blocks = Blocks.over(sizes_E, x_RI.shape[0], block_rows)

    def one_block(number: jax.Array, sums_EIO: jax.Array) -> jax.Array:
        block = blocks.at(number)
        return block.add(block.own(block.of(x_RI)), block.own(block.of(d_RO)), sums_EIO)

    shape = (sizes_E.shape[0], x_RI.shape[1], d_RO.shape[1])
    return lax.fori_loop(0, blocks.number, one_block, jnp.zeros(shape, computed("gradient", d_RO.dtype)))
