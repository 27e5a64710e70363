"""A weight in use that was quantized on its shards at rest, and gathered as codes and scales.

Gradients go to the carrier, which has the weight's shape and dtype. It has no values: no compiled program holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.recipes.formats import E2M1
from shardwright.core.recipes.formula import Quantized, dequantize
from shardwright.core.recipes.kernels import KernelName
from shardwright.core.recipes.recipe import Block, Product, Quantizer
from shardwright.engine_jax.io.layer_io import Resting
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.kernels import Rows, rows_of
from shardwright.engine_jax.precision.operands import Amaxes

Gathered = Quantized | jax.Array
"""A copy of a weight on a device: codes and scales, or the weight itself where products do not quantize it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """An operand of a product, ``[..., other, contracted]``, of ``shape``. ``turned``: these are the codes of its transpose.
    ``dense``: its values instead of codes, of a slice that ends inside blocks."""

    quantized: Quantized
    quantizer: Quantizer
    shape: tuple[int, ...]
    turned: bool
    dense: jax.Array | None = None

    def values(self) -> jax.Array:
        """The values of the codes, float32."""
        if self.dense is not None:
            return self.dense
        own = (*self.shape[:-2], self.shape[-1], self.shape[-2]) if self.turned else self.shape
        found = jnp.asarray(dequantize(self.quantized, own, self.quantizer, ARRAYS), jnp.float32)
        return found.swapaxes(-1, -2) if self.turned else found

    def kernel(self, planned: KernelName | None) -> KernelName:
        """The kernel of a product with it: one of codes needs codes."""
        return "float32" if planned is None or self.dense is not None else planned

    def rows(self, kernel: KernelName) -> Rows:
        """The operand as a kernel takes it."""
        assert self.dense is None, kernel
        quantized, quantizer = self.quantized, self.quantizer
        if self.turned:
            codes = _pairs_turned(quantized.codes, self.shape) if quantizer.dtype == E2M1 else quantized.codes.mT
            block = Block(contracted=quantizer.block.other, other=quantizer.block.contracted)
            quantized = quantized._replace(codes=codes, scales=quantized.scales.mT)
            quantizer = replace(quantizer, block=block)
        return rows_of(kernel, quantized, self.shape, quantizer)


def _pairs_turned(codes: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Bytes of two codes along the last dim of the transpose, as such bytes of an operand of ``shape``."""
    each = jnp.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:-1], -1)[..., : shape[-2]].mT
    each = jnp.pad(each, [*[(0, 0)] * (each.ndim - 1), (0, shape[-1] % 2)])
    return each[..., ::2] | each[..., 1::2] << 4


class Outputs(NamedTuple):
    """So many outputs of a weight from a first one."""

    start: jax.Array | int
    num: int

    def of(self, array: jax.Array, dim: int, per: int = 1) -> jax.Array:
        """Of an array of which an entry along ``dim`` is of ``per`` outputs."""
        return lax.dynamic_slice_in_dim(array, self.start // per, self.num // per, array.ndim + dim)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("carrier", "first", "shard", "amaxes", "factor", "start"),
    meta_fields=("quantizers", "second", "sizes", "num"),
)
@dataclass(frozen=True, slots=True, kw_only=True)
class Coded:
    """``first``: the copy for outputs, which serves input gradients too where ``second`` is None. ``second``: gathers the other
    copy from the shard at rest and the amaxes that are agreed on, or the factor of a delayed one, in the backward pass. ``quantizers``: of both. ``sizes``: how many
    outputs and inputs the copies have. ``start``, ``num``: the outputs in use; None: all.
    """

    carrier: jax.Array | None
    first: Gathered | None
    shard: jax.Array | Resting | None
    amaxes: Amaxes
    quantizers: tuple[Quantizer | None, Quantizer | None]
    second: Callable[[jax.Array | Resting, Amaxes, jax.Array | None], Gathered] | None
    sizes: tuple[int, int]
    factor: jax.Array | None = None
    start: jax.Array | int | None = None
    num: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return carrier_of(self).shape

    @property
    def dtype(self) -> jnp.dtype:
        return carrier_of(self).dtype

    def for_backward(self) -> Coded:
        """Only what a backward pass needs."""
        return replace(self, carrier=None, first=None if self.second else self.first)

    def heads(self, start: jax.Array | int, num: int) -> Coded:
        """Only ``num`` heads, which are dim 1 of the weight."""
        width = self.shape[2]
        carrier = lax.dynamic_slice_in_dim(carrier_of(self), start, num, axis=1)
        return replace(self, carrier=carrier, start=start * width, num=num * width)

    def operand(self, product: Product) -> Codes | jax.Array:
        """What a product multiplies: codes, or the weight itself in its own dims."""
        if product == "output" or self.second is None:
            found, quantizer, turned = self.first, self.quantizers[0], product != "output"
        else:
            assert self.shard is not None
            found, quantizer, turned = self.second(self.shard, self.amaxes, self.factor), self.quantizers[1], False
        outputs = None if self.start is None or self.num is None else Outputs(self.start, self.num)
        if not isinstance(found, Quantized):
            assert found is not None
            merged = found.reshape(len(found), -1)
            return found if outputs is None else outputs.of(merged, -1).reshape(len(found), -1, found.shape[-1])
        assert quantizer is not None
        sizes = self.sizes if product == "output" else self.sizes[::-1]
        codes = Codes(quantized=found, quantizer=quantizer, shape=(*found.codes.shape[:-2], *sizes), turned=turned)
        return codes if outputs is None else _only(codes, product, outputs)


def carrier_of(weight: Coded | jax.Array) -> jax.Array:
    """What has the gradient of a weight in use."""
    if not isinstance(weight, Coded):
        return weight
    assert weight.carrier is not None
    return weight.carrier


def _only(codes: Codes, product: Product, outputs: Outputs) -> Codes:
    of_operand, block = (-2 if product == "output" else -1), codes.quantizer.block
    dim = -3 - of_operand if codes.turned else of_operand
    extent = block.other if dim == -2 else block.contracted
    if extent is not None and outputs.num % extent:
        return replace(codes, dense=outputs.of(codes.values(), of_operand))
    packed = 2 if codes.quantizer.dtype == E2M1 and dim == -1 else 1
    scales = codes.quantized.scales
    sliced = codes.quantized._replace(
        codes=outputs.of(codes.quantized.codes, dim, packed),
        scales=scales if extent is None else outputs.of(scales, dim, extent),
    )
    shape = list(codes.shape)
    shape[of_operand] = outputs.num
    return replace(codes, quantized=sliced, shape=tuple(shape))
