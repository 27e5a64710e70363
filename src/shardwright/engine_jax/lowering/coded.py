"""Weights that are quantized on their shards at rest: codes and scales are gathered (``core/quantization/links.py``)."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.mesh.mesh import Mesh
from shardwright.core.plan.movement import ReshardStep, reshard_steps
from shardwright.core.quantization.quantized import Copy, QuantizedWeight, SentArray
from shardwright.core.recipes.formats import E8M0
from shardwright.core.recipes.formula import Quantized, Shares, quantize, shared_by
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.engine_jax.io.layer_io import LowPrecision
from shardwright.engine_jax.io.redistribute import redistribute
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.coded import Coded, Gathered
from shardwright.engine_jax.precision.operands import Amaxes, agreed_amax


class CodedGather(NamedTuple):
    """The gathers of the copies of a weight. ``names``: the dims of its shard; ``outputs``, ``inputs``: those of its products.
    ``plain``: the steps of the weight itself; ``dtypes``: in which it is gathered and used, so that codes are those of a weight that is
    quantized after it was gathered. ``shape``: in use."""

    low: LowPrecision
    component: str
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    copies: tuple[_Copy, ...]
    plain: tuple[ReshardStep, ...]
    dtypes: tuple[str, str]
    shape: tuple[int, ...]

    @classmethod
    def of(
        cls,
        weight: QuantizedWeight,
        low: LowPrecision,
        names: tuple[str, ...],
        plain: tuple[ReshardStep, ...],
        dtypes: tuple[str, str],
        shape: tuple[int, ...],
        mesh: Mesh,
    ) -> CodedGather:
        return cls(
            low=low,
            component=weight.component,
            names=names,
            outputs=weight.outputs,
            inputs=weight.inputs,
            copies=tuple(_Copy.of(copy, mesh) for copy in weight.copies),
            plain=plain,
            dtypes=dtypes,
            shape=shape,
        )

    def gathered(self, shard: jax.Array) -> Coded:
        """The weight in use; the carrier is zeros, which nothing reads."""
        amaxes: Amaxes = {}
        first, amaxes = self._copy(self.copies[0], shard, amaxes)
        has_second = len(self.copies) > 1
        size = dict(zip(self.names, self.shape, strict=True))
        return Coded(
            carrier=jnp.zeros(self.shape, jnp.dtype(self.dtypes[1])),
            first=first,
            shard=shard if has_second else None,
            amaxes=amaxes,
            quantizers=(self.copies[0].quantizer, self.copies[-1].quantizer),
            second=self.second if has_second else None,
            sizes=(prod(size[name] for name in self.outputs), prod(size[name] for name in self.inputs)),
        )

    def second(self, shard: jax.Array, amaxes: Amaxes) -> Gathered:
        """The copy for input gradients."""
        with of_component(self.component), of_tensor(self.low.name):
            return self._copy(self.copies[1], shard, amaxes)[0]

    def _copy(self, copy: _Copy, shard: jax.Array, amaxes: Amaxes) -> tuple[Gathered, Amaxes]:
        gather_dtype, dtype = map(jnp.dtype, self.dtypes)
        narrow = shard.astype(gather_dtype)
        if copy.quantizer is None:
            return redistribute(narrow, self.plain, self.names).astype(dtype), amaxes
        operand = self._operand(narrow.astype(dtype), copy.product)
        place: tuple[Product, Operand] = (copy.product, "weight")
        key = self.low.same_amax.get(place, place)
        agreed = amaxes[key] if key in amaxes else agreed_amax(operand, self.low, place)
        amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
        return copy.gathered(operand, agreed), amaxes

    def _operand(self, shard: jax.Array, product: Product) -> jax.Array:
        """The shard as a product's operand, ``[..., other, contracted]``, with merged dims."""
        rows, columns = (self.outputs, self.inputs) if product == "output" else (self.inputs, self.outputs)
        leading = tuple(name for name in self.names if name not in (*rows, *columns))
        order = [self.names.index(name) for name in (*leading, *rows, *columns)]
        size = dict(zip(self.names, shard.shape, strict=True))
        merged = (prod(size[name] for name in names) for names in (rows, columns))
        return shard.transpose(order).reshape(*(size[name] for name in leading), *merged)


class _Copy(NamedTuple):
    """``product``: the first that multiplies it. ``arrays``: the steps and the dims of codes, scales, and second scales."""

    product: Product
    quantizer: Quantizer | None
    arrays: tuple[tuple[tuple[ReshardStep, ...], tuple[str, ...]], ...]

    @classmethod
    def of(cls, copy: Copy, mesh: Mesh) -> _Copy:
        return cls(
            copy.products[0], copy.quantizer, tuple((_steps(one, mesh), tuple(one.shape)) for one in copy.arrays)
        )

    def gathered(self, operand: jax.Array, agreed: jax.Array | None) -> Quantized:
        quantizer = self.quantizer
        assert quantizer is not None

        def agree(amax: jax.Array, of: Shares) -> jax.Array:
            return amax if agreed is None or of != shared_by(quantizer) else agreed.reshape(amax.shape)

        own = quantize(operand, quantizer, ARRAYS, agree=agree)
        as_bytes = quantizer.scale.dtype == E8M0
        sent = (own.codes, ARRAYS.bytes_of(own.scales) if as_bytes else own.scales, own.of_tensor)
        found = [redistribute(array, *steps) for array, steps in zip(sent, self.arrays, strict=False)]
        scales = lax.bitcast_convert_type(found[1], jnp.dtype(E8M0)) if as_bytes else found[1]
        return Quantized(codes=found[0], scales=scales, of_tensor=found[2] if len(found) > 2 else None)


def _steps(array: SentArray, mesh: Mesh) -> tuple[ReshardStep, ...]:
    return (
        *reshard_steps(array.at_rest, array.gathered, (), mesh),
        *reshard_steps(array.gathered, array.in_use, (), mesh),
    )
