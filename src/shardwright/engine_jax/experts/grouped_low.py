"""The experts' grouped products with quantized operands: each expert's rows are an operand of their own, as its matrix is.

R rows of a buffer, E experts of a device, M embed, F hidden units; I and O the input and output widths of a matrix, X any width,
P rows of a block. G: E, and the rows of no expert.

Blocks over rows, which a matrix's gradient has, begin with the first row of each expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from shardwright.core.recipes.formula import Shares, amax_of, dequantize, quantize, shared_by
from shardwright.core.recipes.hadamard import padded_to
from shardwright.core.recipes.kernels import KernelName
from shardwright.core.recipes.recipe import OPERANDS, PER_TENSOR, Operand, Product, Quantizer
from shardwright.engine_jax.experts.grouped_blocks import Block, Blocks, Matrices, activated
from shardwright.engine_jax.io.dtypes import computed
from shardwright.engine_jax.io.layer_io import LowPrecision, Site
from shardwright.engine_jax.io.scopes import of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.coded import Coded, Codes, carrier_of
from shardwright.engine_jax.precision.delayed import amaxes_of_step
from shardwright.engine_jax.precision.kernels import Rows, multiplied, product_of, rows_of
from shardwright.engine_jax.precision.operands import INPUT, Amaxes, agreed_amax, codes_of, turned, values
from shardwright.engine_jax.precision.random_bits import Slots, random_numbers

HIGH = LowPrecision(quantizers={})

_Operand = jax.Array | Rows
"""Values, or what a kernel takes that multiplies codes."""


def quantized_swiglu(
    rows_RM: jax.Array,
    experts: Matrices,
    sizes_E: jax.Array,
    block_rows: int,
    low: Sequence[LowPrecision | None],
    names: tuple[str, str],
) -> jax.Array:
    """``grouped_swiglu`` of operands that are quantized as ``low`` says of the products with gate, up and down."""
    gate, up, down = (precision or HIGH for precision in low)
    # Both weights have the same input.
    amaxes: Amaxes = {}
    for one in (gate, up):
        _, amaxes = _of_expert(INPUT, rows_RM, one, amaxes, _Rows.of(rows_RM, sizes_E))

    product = partial(quantized_grouped_product, sizes_E=sizes_E, block_rows=block_rows)
    gate_RF = checkpoint_name(product(rows_RM, experts.gate_EMF, low=gate, amaxes=amaxes), names[0])
    up_RF = checkpoint_name(product(rows_RM, experts.up_EMF, low=up, amaxes=amaxes), names[1])
    return product(activated(gate_RF, up_RF), experts.down_EFM, low=down, amaxes={})


def quantized_grouped_product(
    x_RI: jax.Array,
    matrices_EIO: jax.Array | Coded,
    sizes_E: jax.Array,
    block_rows: int,
    low: LowPrecision,
    amaxes: Amaxes,
) -> jax.Array:
    """Each row times the matrix of its own expert, RO, and the two products of the backward pass."""
    carrier_EIO, dtype = carrier_of(matrices_EIO), matrices_EIO.dtype

    def by_own_matrix(name: Product, x: _Operand, matrices: _Operand, like: jax.Array, sizes_E: jax.Array) -> jax.Array:
        with of_tensor(low.name):
            blocks = Blocks.over(sizes_E, like.shape[0], block_rows)
            return _by_own_matrix(_kernel(low, name), x, matrices, blocks, like.dtype)

    def forward(
        x_RI: jax.Array, matrices_EIO: jax.Array | Coded, sizes_E: jax.Array, amaxes: Amaxes, site: Site
    ) -> tuple[jax.Array, Amaxes]:
        rows = _Rows.of(x_RI, sizes_E)
        x, matrices, amaxes = _operands("output", low, x_RI, _outputs_first(matrices_EIO), rows, amaxes, site)
        return by_own_matrix("output", x, matrices, x_RI, sizes_E), amaxes

    @jax.custom_vjp
    def product(
        x_RI: jax.Array,
        carrier_EIO: jax.Array,
        matrices_EIO: jax.Array | Coded,
        sizes_E: jax.Array,
        amaxes: Amaxes,
        site: Site,
    ) -> jax.Array:
        del carrier_EIO
        return forward(x_RI, matrices_EIO, sizes_E, amaxes, site)[0]

    def saving(
        x_RI: jax.Array,
        carrier_EIO: jax.Array,
        matrices_EIO: jax.Array | Coded,
        sizes_E: jax.Array,
        amaxes: Amaxes,
        site: Site,
    ):
        del carrier_EIO
        y_RO, amaxes = forward(x_RI, matrices_EIO, sizes_E, amaxes, site)
        matrices = matrices_EIO.for_backward() if isinstance(matrices_EIO, Coded) else matrices_EIO
        return y_RO, (x_RI, matrices, sizes_E, amaxes, site)

    def backward(saved: tuple[jax.Array, jax.Array | Coded, jax.Array, Amaxes, Site], d_RO: jax.Array):
        x_RI, matrices_EIO, sizes_E, amaxes, site = saved
        rows, d_RO = _Rows.of(x_RI, sizes_E), d_RO.astype(x_RI.dtype)
        matrices = matrices_EIO.operand("input_gradient") if isinstance(matrices_EIO, Coded) else matrices_EIO
        d, matrices, amaxes = _operands("input_gradient", low, d_RO, matrices, rows, amaxes, site)
        d_x_RI = by_own_matrix("input_gradient", d, matrices, x_RI, sizes_E)
        own_x, own_d, own_rows, own_sizes = _for_matrices(low, x_RI, d_RO, rows, sizes_E, site)
        x, d, _ = _operands("weight_gradient", low, own_x, own_d, own_rows, amaxes, site)
        with of_tensor(low.name):
            blocks = Blocks.over(own_sizes, own_x.shape[0], block_rows)
            d_matrices_EIO = _over_own_rows(
                _kernel(low, "weight_gradient"), x, d, blocks, computed("gradient", x_RI.dtype)
            )
        own: dict[Operand, Callable[[Quantizer], jax.Array]] = {
            "input": partial(rows.amax_of_experts, x_RI),
            "output_gradient": partial(rows.amax_of_experts, d_RO),
        }
        if not isinstance(matrices_EIO, Coded):
            own["weight"] = lambda quantizer: amax_of(matrices_EIO, quantizer, ARRAYS)
        d_site = amaxes_of_step(low, site, own)
        return d_x_RI, d_matrices_EIO.astype(dtype), None, None, None, d_site

    product.defvjp(saving, backward)
    return product(x_RI, carrier_EIO, jax.lax.stop_gradient(matrices_EIO), sizes_E, amaxes, low.own_site)


def _outputs_first(matrices_EIO: jax.Array | Coded) -> jax.Array | Codes:
    operand = matrices_EIO.operand("output") if isinstance(matrices_EIO, Coded) else matrices_EIO
    return operand if isinstance(operand, Codes) else operand.swapaxes(1, 2)


class _Rows(NamedTuple):
    """The expert of each row, E where it has none, the row's number among those of its expert, the rows of each expert and of none,
    and the number of experts."""

    expert_R: jax.Array
    number_R: jax.Array
    size_G: jax.Array
    experts: int

    @classmethod
    def of(cls, x_RX: jax.Array, sizes_E: jax.Array) -> _Rows:
        end_E = jnp.cumsum(sizes_E)
        row_R = jnp.arange(x_RX.shape[0], dtype=jnp.int32)
        expert_R = jnp.sum(row_R[:, None] >= end_E[None], axis=1, dtype=jnp.int32)
        start_E = jnp.append(end_E - sizes_E, end_E[-1])
        size_G = jnp.append(sizes_E, x_RX.shape[0] - end_E[-1])
        return cls(expert_R, row_R - start_E[expert_R], size_G, sizes_E.shape[0])

    @property
    def slots(self) -> Slots:
        return Slots(self.number_R, self.expert_R)

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


def _kernel(low: LowPrecision, name: Product) -> KernelName:
    return low.kernels.get(name, "float32")


def _operands(
    name: Product, low: LowPrecision, x: jax.Array, y: jax.Array | Codes, rows: _Rows, amaxes: Amaxes, site: Site
) -> tuple[_Operand, _Operand, Amaxes]:
    """Both operands of a product as they are multiplied, and all amaxes that are agreed on now.

    ``x`` has rows, ``y`` rows or matrices, whose contracted dim is last.
    """
    quantizers = [low.quantizers.get((name, operand)) for operand in OPERANDS[name]]
    kernel = _kernel(low, name)
    found: list[_Operand] = []
    for operand, array, quantizer in zip(OPERANDS[name], (x, y), quantizers, strict=True):
        if isinstance(array, Codes):
            narrow = array.rows(kernel) if kernel != "float32" else array.values()
            found.append(narrow.astype(x.dtype) if None in quantizers and isinstance(narrow, jax.Array) else narrow)
            continue
        if quantizer is None:
            found.append(array)
            continue
        place = (name, operand)
        factor = site.factors[low.delayed[place]] if place in low.delayed else None
        if array.ndim == 3:
            key = low.same_amax.get(place, place)
            agreed = amaxes[key] if key in amaxes else agreed_amax(array, low, place)
            amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
            random = random_numbers(place, low, site, array.shape)
            narrow = _matrices(kernel, array, quantizer, agreed, factor, random)
        elif factor is not None:
            random = random_numbers(place, low, site, array.shape, rows.slots)
            narrow = _delayed(kernel, array, quantizer, rows.of_rows(factor), random)
        else:
            agreed, amaxes = _of_expert(place, array, low, amaxes, rows)
            random = random_numbers(place, low, site, array.shape, rows.slots)
            if name == "weight_gradient":
                narrow = _along_rows(kernel, array, quantizer, agreed, random)
            else:
                narrow = _of_rows(kernel, array, quantizer, agreed, low.amax_axes.get(place, ()), random)
        # A product with an operand in high precision multiplies in the dtype of the computation.
        if None in quantizers and isinstance(narrow, jax.Array):
            narrow = narrow.astype(array.dtype)
        found.append(narrow)
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


def _matrices(
    kernel: KernelName,
    matrices_EOI: jax.Array,
    quantizer: Quantizer,
    agreed: jax.Array | None,
    factor: jax.Array | None,
    random: jax.Array | None,
) -> _Operand:
    if kernel == "float32":
        return values(matrices_EOI, quantizer, agreed, factor=factor, random=random)
    codes = codes_of(matrices_EOI, quantizer, agreed, factor=factor, random=random)
    return rows_of(kernel, codes, matrices_EOI.shape, quantizer)


def _delayed(
    kernel: KernelName, x_RX: jax.Array, quantizer: Quantizer, factor_R: jax.Array, random_RX: jax.Array | None
) -> _Operand:
    """Rows with the factor of their expert, whatever is contracted."""
    as_operands = x_RX.reshape(x_RX.shape[0], 1, x_RX.shape[1])
    random = None if random_RX is None else random_RX.reshape(as_operands.shape)
    codes = codes_of(as_operands, quantizer, factor=factor_R, random=random)
    if kernel == "float32":
        return dequantize(codes, as_operands.shape, quantizer, ARRAYS).reshape(x_RX.shape)
    found = rows_of(kernel, codes, as_operands.shape, quantizer)
    return jax.tree.map(lambda one: one[:, 0], found)


def _for_matrices(
    low: LowPrecision, x_RI: jax.Array, d_RO: jax.Array, rows: _Rows, sizes_E: jax.Array, site: Site
) -> tuple[jax.Array, jax.Array, _Rows, jax.Array]:
    """The operands of a matrix's gradient after their Hadamard transform, with their rows and the rows of each expert. Blocks over rows, and
    groups of a transform, begin with the first row of each expert, so that each has rows of its own up to entire ones."""
    unit = _rows_unit(low)
    if unit == 1:
        return x_RI, d_RO, rows, sizes_E
    full_E = -(-sizes_E // unit) * unit
    num = padded_to(x_RI.shape[0] + rows.experts * (unit - 1), unit)
    start_E = jnp.append(jnp.cumsum(full_E) - full_E, num)
    place_R = start_E[rows.expert_R] + rows.number_R
    quantizer, found = low.quantizers.get(("weight_gradient", "input")), list[jax.Array]()
    for array in (x_RI, d_RO):
        spread = jnp.zeros((num, array.shape[1]), array.dtype).at[place_R].set(array, mode="drop")
        if quantizer is not None and quantizer.hadamard is not None:
            spread = _of_groups(turned(_in_groups(spread, quantizer.hadamard), quantizer, site))
        found.append(spread)
    x, d = found
    return x, d, _Rows.of(x, full_E), full_E


def _rows_unit(low: LowPrecision) -> int:
    """What the number of an expert's rows is filled up to a multiple of, where a matrix's gradient is computed."""
    found = [low.quantizers.get(("weight_gradient", operand)) for operand in OPERANDS["weight_gradient"]]
    return lcm(*(lcm(one.hadamard or 1, one.block.contracted or 1) for one in found if one is not None))


def _in_groups(x_RX: jax.Array, size: int) -> jax.Array:
    """Groups of rows, which are contracted: each X by ``size``."""
    return x_RX.reshape(-1, size, x_RX.shape[1]).swapaxes(1, 2)


def _of_groups(x: jax.Array) -> jax.Array:
    return x.swapaxes(1, 2).reshape(-1, x.shape[1])


def _of_rows(
    kernel: KernelName,
    x_RX: jax.Array,
    quantizer: Quantizer,
    of_expert_R: jax.Array | None,
    axes: tuple[str, ...],
    random_RX: jax.Array | None,
) -> _Operand:
    """Rows whose last dim is contracted. Each is an operand of its own, but for scales of all rows of an expert."""

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        if of != shared_by(quantizer):
            return amax
        if of_expert_R is not None:
            return of_expert_R.reshape(amax.shape)
        return lax.pmax(amax, axes) if axes else amax

    shape = (x_RX.shape[0], 1, x_RX.shape[1])
    random = None if random_RX is None else random_RX.reshape(shape)
    codes = quantize(x_RX.reshape(shape), quantizer, ARRAYS, agree=agree, random=random)
    if kernel == "float32":
        return dequantize(codes, shape, quantizer, ARRAYS).reshape(x_RX.shape)
    found = rows_of(kernel, codes, shape, quantizer)
    return jax.tree.map(lambda one: one[:, 0], found)


def _along_rows(
    kernel: KernelName,
    x_RX: jax.Array,
    quantizer: Quantizer,
    of_expert_R: jax.Array | None,
    random_RX: jax.Array | None,
) -> _Operand:
    """Rows that are themselves contracted: each has the scale of its expert's, or blocks of them are operands."""
    block = quantizer.block
    if block == PER_TENSOR:
        return _of_rows(kernel, x_RX, quantizer, of_expert_R, (), random_RX)
    assert block.other == 1, block
    assert block.contracted is not None, block
    assert kernel in ("float32", "bfloat16"), kernel
    size = block.contracted

    def agree(amax: jax.Array, of: Shares) -> jax.Array:
        # All rows of a block are of one expert.
        own = None if of_expert_R is None or of != shared_by(quantizer) else of_expert_R[::size]
        return amax if own is None else own.reshape(amax.shape)

    groups = _in_groups(x_RX, size)
    random = None if random_RX is None else _in_groups(random_RX, size)
    codes = quantize(groups, quantizer, ARRAYS, agree=agree, random=random)
    if kernel == "float32":
        return _of_groups(jnp.asarray(dequantize(codes, groups.shape, quantizer, ARRAYS)))
    narrow = dequantize(codes._replace(of_tensor=None), groups.shape, quantizer, ARRAYS).astype(jnp.bfloat16)
    after = None if codes.of_tensor is None else jnp.repeat(codes.of_tensor.reshape(-1, 1), size, axis=0)
    return Rows(_of_groups(narrow), None, after)


def _by_own_matrix(kernel: KernelName, x: _Operand, matrices: _Operand, blocks: Blocks, dtype: jnp.dtype) -> jax.Array:
    """Rows times the transposed matrices of their experts, RO. Rows of no expert are 0."""
    outputs = jax.tree.leaves(matrices)[0].shape[1]

    def one_block(number: jax.Array, done_RO: jax.Array) -> jax.Array:
        block = blocks.at(number)
        of_block, of_expert = jax.tree.map(block.of, x), jax.tree.map(block.matrix, matrices)
        if isinstance(x, Rows):
            return block.put(multiplied(kernel, of_block, of_expert), done_RO)
        return block.put(product_of(of_block, of_expert, kernel, dim=1), done_RO)

    return lax.fori_loop(0, blocks.number, one_block, jnp.zeros((blocks.rows, outputs), dtype))


def _over_own_rows(kernel: KernelName, x: _Operand, d: _Operand, blocks: Blocks, dtype: jnp.dtype) -> jax.Array:
    """The product of both over the rows of each expert, EIO."""

    def own(block: Block, operand: _Operand) -> tuple[jax.Array, jax.Array | None]:
        """The rows of a block's expert, others 0; and the scale of all of them."""
        if not isinstance(operand, Rows):
            return block.own(block.of(operand)), None
        after = None if operand.after is None else jnp.max(block.own(block.of(operand.after)))
        return block.own(block.of(operand.codes)), after

    def one_block(number: jax.Array, sums_EIO: jax.Array) -> jax.Array:
        block = blocks.at(number)
        (left, left_after), (right, right_after) = own(block, x), own(block, d)
        product = product_of(left, right, kernel, dim=0)
        for after in (left_after, right_after):
            product = product if after is None else product * after
        sums = block.matrix(sums_EIO) + product.astype(sums_EIO.dtype)
        return lax.dynamic_update_index_in_dim(sums_EIO, sums, block.expert, 0)

    widths = (jax.tree.leaves(one)[0].shape[1] for one in (x, d))
    zeros_EIO = jnp.zeros((blocks.sizes_E.shape[0], *widths), dtype)
    return lax.fori_loop(0, blocks.number, one_block, zeros_EIO)
