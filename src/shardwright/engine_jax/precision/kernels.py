"""Products of quantized operands by the kernels of ``core/recipes/kernels.py`` that multiply codes, or their values in bfloat16.

R and S rows of the two operands, K elements that are contracted, N blocks of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formats import E2M1, E8M0
from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.kernels import MX_BLOCK, KernelName
from shardwright.core.recipes.recipe import ENTIRE, Quantizer
from shardwright.engine_jax.precision.arrays import ARRAYS

FP8 = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
"""Sums in float32, not in the fewer bits of the fast accumulation."""

_EXPONENT, _FRACTION_BITS = 0xFF, 23


class Rows(NamedTuple):
    """An operand, or one for each index of leading dims, as a kernel takes it.

    ``codes``, RK: narrow, or in bfloat16 with the scales that leave them exact; of E2M1 bytes of two. ``scales``, RN: those that
    the kernel multiplies with; None where it takes none. ``after``, R1: the scales that the sums of a row are multiplied with; None
    without such. Rows may be sliced: each has all that belongs to it.
    """

    codes: jax.Array
    scales: jax.Array | None
    after: jax.Array | None


def rows_of(
    kernel: KernelName, found: Quantized, shape: tuple[int, ...], quantizer: Quantizer, contracted_dims: int = 1
) -> Rows:
    """The operand of ``shape`` with these codes and scales; its last ``contracted_dims`` dims are contracted."""
    *leading, other = shape[:-contracted_dims]
    by_row = (*leading, other, -1)
    after, scales = found.of_tensor, None
    after = None if after is None else jnp.broadcast_to(after.reshape(*leading, 1, 1), (*leading, other, 1))
    if quantizer.block.contracted is ENTIRE:
        of_row = _of_each(found.scales.reshape(*leading, -1, 1), quantizer, other)
        after = of_row if after is None else after * of_row
        found = found._replace(scales=jnp.ones_like(found.scales))
    else:
        scales = _of_each(found.scales.reshape(*leading, found.scales.shape[len(leading)], -1), quantizer, other)
    if kernel == "bfloat16":
        exact = dequantize(found._replace(of_tensor=None), shape, quantizer, ARRAYS, contracted_dims=contracted_dims)
        return Rows(exact.astype(jnp.bfloat16).reshape(by_row), None, after)
    sent = None if scales is None else _as_sent(scales, quantizer)
    return Rows(_entire_blocks(found.codes, shape, quantizer).reshape(by_row), sent, after)


def multiplied(kernel: KernelName, x: Rows, y: Rows) -> jax.Array:
    """The sums over K of two operands with R and S rows, RS in float32."""
    sums = _sums(kernel, x, y)
    sums = sums if x.after is None else sums * x.after
    return sums if y.after is None else sums * y.after.T


def _sums(kernel: KernelName, x: Rows, y: Rows) -> jax.Array:
    if kernel in ("mx", "nvfp4"):
        assert x.scales is not None, kernel
        assert y.scales is not None, kernel
        left, right = (_unpacked(one.codes) if kernel == "nvfp4" else one.codes for one in (x, y))
        return jax.nn.scaled_matmul(
            left[None], right[None], x.scales[None], y.scales[None], preferred_element_type=jnp.float32
        )[0]
    return product_of(x.codes, y.codes, kernel, dim=1)


def product_of(x: jax.Array, y: jax.Array, kernel: KernelName | None, *, dim: int) -> jax.Array:
    """The sums over a dim of two matrices, in float32. ``kernel``: None where an operand is not quantized."""
    # All bits of float32: some devices round its operands otherwise.
    precision = {"fp8": FP8, "float32": lax.Precision.HIGHEST}.get(kernel or "")
    return lax.dot_general(
        x, y, (((dim,), (dim,)), ((), ())), precision=precision, preferred_element_type=jnp.dtype(jnp.float32)
    )


def _unpacked(codes: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(*codes.shape[:-1], -1)


def _of_each(scales: jax.Array, quantizer: Quantizer, other: int) -> jax.Array:
    """The scales of blocks of rows, for each of their rows."""
    return jnp.repeat(scales, quantizer.block.other or other, axis=-2)[..., :other, :]


def _entire_blocks(codes: jax.Array, shape: tuple[int, ...], quantizer: Quantizer) -> jax.Array:
    """The codes with zeros at the end of the last contracted dim, up to the end of its last block."""
    block = quantizer.block.contracted
    if block is None or not shape[-1] % block:
        return codes
    bytes_of_block = block // 2 if quantizer.dtype == E2M1 else block
    more = -codes.shape[-1] % bytes_of_block
    return jnp.pad(codes, [*[(0, 0)] * (codes.ndim - 1), (0, more)])


def _as_sent(scales: jax.Array, quantizer: Quantizer) -> jax.Array:
    """Scales that are powers of two as E8M0, one for each 32 elements; those of NVFP4 as they are."""
    block = quantizer.block.contracted
    if block is None or quantizer.dtype == E2M1:
        return scales
    if quantizer.scale.dtype != E8M0:
        byte = (lax.bitcast_convert_type(scales, jnp.int32) >> _FRACTION_BITS) & _EXPONENT
        scales = ARRAYS.as_codes(byte, E8M0)
    return jnp.repeat(scales, block // MX_BLOCK, axis=-1)
