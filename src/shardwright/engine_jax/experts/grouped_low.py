"""The experts' grouped products with quantized operands: each expert's rows are an operand of their own, as its matrix is.

R rows of a buffer, E experts of a device, M embed, F hidden units; I and O the input and output widths of a matrix, X any width,
P rows of a block.

Blocks over rows, which a matrix's gradient has, begin with the first row of each expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formula import Shares, amax_of, dequantize, quantize, shared_by
from shardwright.core.recipes.recipe import OPERANDS, PER_TENSOR, Operand, Product, Quantizer
from shardwright.engine_jax.experts.grouped_blocks import Blocks, Matrices, activated
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import LowPrecision, Site
from shardwright.engine_jax.io.scopes import of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.delayed import amaxes_of_step
from shardwright.engine_jax.precision.operands import INPUT, Amaxes, agreed_amax, values

HIGH = LowPrecision(quantizers={})


def quantized_swiglu(
    rows_RM: jax.Array, experts: Matrices, sizes_E: jax.Array, block_rows: int, low: Mapping[str, LowPrecision]
) -> jax.Array:
    """``grouped_swiglu`` of operands that are quantized as ``low`` says, by ``moe.gate``, ``moe.up`` and ``moe.down``."""
    gate, up, down = (low.get(f"moe.{name}", HIGH) for name in ("gate", "up", "down"))
    # Both weights have the same input.
    amaxes: Amaxes = {}
    for one in (gate, up):
        _, amaxes = _of_expert(INPUT, rows_RM, one, amaxes, _Rows.of(rows_RM, sizes_E))

    def product(x: jax.Array, matrices: jax.Array, of: LowPrecision, amaxes: Amaxes) -> jax.Array:
        return quantized_grouped_product(x, matrices, sizes_E, block_rows, of, amaxes)

    gate_RF = product(rows_RM, experts.gate_EMF, gate, amaxes)
    up_RF = product(rows_RM, experts.up_EMF, up, amaxes)
    return product(activated(gate_RF, up_RF), experts.down_EFM, down, {})


def quantized_grouped_product(
    x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array, block_rows: int, low: LowPrecision, amaxes: Amaxes
) -> jax.Array:
    """Each row times the matrix of its own expert, RO, and the two products of the backward pass."""

    def forward(
        x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array, amaxes: Amaxes, site: Site
    ) -> tuple[jax.Array, Amaxes]:
        rows = _Rows.of(x_RI, sizes_E)
        x, matrices, amaxes = _operands("output", low, x_RI, matrices_EIO.swapaxes(1, 2), rows, amaxes, site)
        return _by_own_matrix(x, matrices, sizes_E, block_rows).astype(x_RI.dtype), amaxes

    @jax.custom_vjp
    def product(x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array, amaxes: Amaxes, site: Site) -> jax.Array:
        return forward(x_RI, matrices_EIO, sizes_E, amaxes, site)[0]

    def saving(x_RI: jax.Array, matrices_EIO: jax.Array, sizes_E: jax.Array, amaxes: Amaxes, site: Site):
        y_RO, amaxes = forward(x_RI, matrices_EIO, sizes_E, amaxes, site)
        return y_RO, (x_RI, matrices_EIO, sizes_E, amaxes, site)

    def backward(saved: tuple[jax.Array, jax.Array, jax.Array, Amaxes, Site], d_RO: jax.Array):
        x_RI, matrices_EIO, sizes_E, amaxes, site = saved
        rows, d_RO = _Rows.of(x_RI, sizes_E), d_RO.astype(x_RI.dtype)
        d, matrices, amaxes = _operands("input_gradient", low, d_RO, matrices_EIO, rows, amaxes, site)
        d_x_RI = _by_own_matrix(d, matrices, sizes_E, block_rows).astype(x_RI.dtype)
        x, d, _ = _operands("weight_gradient", low, x_RI, d_RO, rows, amaxes, site)
        d_site = amaxes_of_step(
            low,
            site,
            {
                "input": partial(rows.amax_of_experts, x_RI),
                "weight": lambda quantizer: amax_of(matrices_EIO, quantizer, ARRAYS),
                "output_gradient": partial(rows.amax_of_experts, d_RO),
            },
        )
        return d_x_RI, _over_own_rows(x, d, sizes_E, block_rows).astype(matrices_EIO.dtype), None, None, d_site

    product.defvjp(saving, backward)
    return product(x_RI, matrices_EIO, sizes_E, amaxes, low.own_site)


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

    def of_expert(self, amax_RX: jax.Array) -> jax.Array:
        """The largest amax of each expert's rows, and of those of none, E + 1."""
        amax_R = jnp.max(amax_RX.reshape(amax_RX.shape[0], -1), axis=1)
        return jax.ops.segment_max(amax_R, self.expert_R, self.experts + 1)

    def amax_of_experts(self, x_RX: jax.Array, quantizer: Quantizer) -> jax.Array:
        """The amax of each expert's rows, E; 0 of an expert without rows."""
        amax_R = amax_of(x_RX.reshape(x_RX.shape[0], 1, x_RX.shape[1]), quantizer, ARRAYS)
        return jnp.maximum(self.of_expert(amax_R)[: self.experts], 0)

    def of_rows(self, factor_E: jax.Array) -> jax.Array:
        """The factor of each row; 1 for rows of no expert."""
        return jnp.append(factor_E, jnp.ones(1, factor_E.dtype))[self.expert_R]

    def of_block(self, amax_RX: jax.Array, rows: int) -> jax.Array:
        """For each row, the largest amax of the rows of its block of so many rows."""
        blocks = -(-amax_RX.shape[0] // rows)
        block_R = self.expert_R * blocks + self.number_R // rows
        return jax.ops.segment_max(amax_RX, block_R, (self.experts + 1) * blocks)[block_R]


def _operands(
    name: Product, low: LowPrecision, x: jax.Array, y: jax.Array, rows: _Rows, amaxes: Amaxes, site: Site
) -> tuple[jax.Array, jax.Array, Amaxes]:
    """Both operands of a product as they are multiplied, and all amaxes that are agreed on now.

    ``x`` has rows, ``y`` rows or matrices, whose contracted dim is last.
    """
    quantizers = [low.quantizers.get((name, operand)) for operand in OPERANDS[name]]
    found = []
    for operand, array, quantizer in zip(OPERANDS[name], (x, y), quantizers, strict=True):
        if quantizer is None:
            found.append(array)
            continue
        place = (name, operand)
        factor = site.factors[low.delayed[place]] if place in low.delayed else None
        if array.ndim == 3:
            key = low.same_amax.get(place, place)
            agreed = amaxes[key] if key in amaxes else agreed_amax(array, low, place)
            amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
            narrow = values(array, quantizer, agreed, factor=factor)
        elif factor is not None:
            as_operands = array.reshape(array.shape[0], 1, array.shape[1])
            narrow = values(as_operands, quantizer, factor=rows.of_rows(factor)).reshape(array.shape)
        else:
            agreed, amaxes = _of_expert(place, array, low, amaxes, rows)
            if name == "weight_gradient":
                narrow = _along_rows(array, quantizer, agreed, rows)
            else:
                narrow = _of_rows(array, quantizer, agreed, low.amax_axes.get(place, ()))
        found.append(narrow if None not in quantizers else narrow.astype(array.dtype))
    return found[0], found[1], amaxes


def _of_expert(
    place: tuple[Product, Operand], x_RX: jax.Array, low: LowPrecision, amaxes: Amaxes, rows: _Rows
) -> tuple[jax.Array | None, Amaxes]:
    """For each row, the amax of all of its expert's, where a scale is of these: agreed on once; and all amaxes known now."""
    quantizer = low.quantizers.get(place)
    if quantizer is None or not quantizer.of_tensor or quantizer.amax == "delayed":
        return None, amaxes
    key = low.same_amax.get(place, place)
    if key not in amaxes:
        as_operands = x_RX.reshape(x_RX.shape[0], 1, x_RX.shape[1])
        agreed_E = rows.of_expert(amax_of(as_operands, quantizer, ARRAYS))
        if axes := low.amax_axes.get(place, ()):
            with of_tensor(low.name):
                agreed_E = lax.pmax(agreed_E, axes)
        amaxes = {**amaxes, key: agreed_E}
    return amaxes[key][rows.expert_R], amaxes


def _of_rows(x_RX: jax.Array, quantizer: Quantizer, of_expert_R: jax.Array | None, axes: tuple[str, ...]) -> jax.Array:
    """Rows whose last dim is contracted. Each is an operand of its own, but for scales of all rows of an expert."""

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        if of != shared_by(quantizer):
            return amax
        if of_expert_R is not None:
            return of_expert_R.reshape(amax.shape)
        return lax.pmax(amax, axes) if axes else amax

    shape = (x_RX.shape[0], 1, x_RX.shape[1])
    codes = quantize(x_RX.reshape(shape), quantizer, ARRAYS, agree=agree)
    return dequantize(codes, shape, quantizer, ARRAYS).reshape(x_RX.shape)


def _along_rows(x_RX: jax.Array, quantizer: Quantizer, of_expert_R: jax.Array | None, rows: _Rows) -> jax.Array:
    """Rows that are themselves contracted. Each element is an operand of its own, which agrees with the others of its block."""
    assert quantizer.hadamard is None, quantizer
    block = quantizer.block
    assert block == PER_TENSOR or (block.other == 1 and block.contracted), block

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        if of == shared_by(quantizer) and of_expert_R is not None:
            return jnp.broadcast_to(of_expert_R.reshape(-1, *[1] * (amax.ndim - 1)), amax.shape)
        return rows.of_block(amax, block.contracted or 1)

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
