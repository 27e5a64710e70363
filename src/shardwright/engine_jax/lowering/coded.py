"""Weights that are quantized on their shards at rest, when they are gathered or, where they rest as codes, after each step: codes and
scales are gathered (``core/quantization/links.py``)."""

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
from shardwright.core.recipes.formula import Quantized, Shares, amax_of, quantize, shared_by
from shardwright.core.recipes.recipe import Operand, Product, Quantizer
from shardwright.engine_jax.io.layer_io import LowPrecision, Resting, index_of
from shardwright.engine_jax.io.redistribute import redistribute
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS
from shardwright.engine_jax.precision.coded import Coded, Gathered
from shardwright.engine_jax.precision.operands import Amaxes, agreed_amax


class CodedGather(NamedTuple):
    """The gathers of the copies of a weight. ``names``: the dims of its shard; ``outputs``, ``inputs``: those of its products.
    ``plain``: the steps of the weight itself; ``dtypes``: in which it is gathered and used, so that codes are those of a weight that is
    quantized after it was gathered. ``shape``: in use. ``expert_axes``: those whose devices have other experts at rest, of the same in use."""

    low: LowPrecision
    component: str
    names: tuple[str, ...]
    outputs: tuple[str, ...]
    inputs: tuple[str, ...]
    copies: tuple[_Copy, ...]
    plain: tuple[ReshardStep, ...]
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    expert_axes: tuple[str, ...]

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
            expert_axes=tuple(
                axis
                for copy in weight.copies[:1]
                for array in copy.arrays[:1]
                for axis in array.at_rest.axes_of("experts")
                if axis not in weight.expert_axes
            ),
        )

    def gathered(self, shard: jax.Array | Resting, factor: jax.Array | None = None) -> Coded:
        """The weight in use; the carrier is zeros, which nothing reads. ``shard``: at rest; ``factor``: of a delayed amax."""
        amaxes: Amaxes = {}
        first, amaxes = self._copy(0, shard, amaxes, factor)
        has_second = len(self.copies) > 1
        size = dict(zip(self.names, self.shape, strict=True))
        return Coded(
            carrier=jnp.zeros(self.shape, jnp.dtype(self.dtypes[1])),
            first=first,
            shard=shard if has_second else None,
            amaxes=amaxes,
            factor=factor if has_second else None,
            quantizers=(self.copies[0].quantizer, self.copies[-1].quantizer),
            second=self.second if has_second else None,
            sizes=(prod(size[name] for name in self.outputs), prod(size[name] for name in self.inputs)),
        )

    def second(self, shard: jax.Array | Resting, amaxes: Amaxes, factor: jax.Array | None = None) -> Gathered:
        """The copy for input gradients."""
        with of_component(self.component), of_tensor(self.low.name):
            return self._copy(1, shard, amaxes, factor)[0]

    def amax(self, shard: jax.Array, factor: jax.Array) -> jax.Array:
        """The amax of a shard with a delayed one, in the shape of ``factor``: 0 of experts that other devices have at rest."""
        copy = next(one for one in self.copies if one.quantizer is not None)
        assert copy.quantizer is not None
        own = ARRAYS.of_bits(amax_of(self._narrow(shard, copy.product), copy.quantizer, ARRAYS))
        if not factor.ndim:
            return own.reshape(())
        start = index_of(self.expert_axes) * len(own)
        return lax.dynamic_update_slice_in_dim(jnp.zeros_like(factor), own.reshape(-1), start, axis=0)

    def resting(self, shard: jax.Array) -> Resting:
        """All copies of a weight as they rest."""
        amaxes: Amaxes = {}
        found: list[tuple[jax.Array, ...]] = []
        with of_component(self.component), of_tensor(self.low.name):
            for copy in self.copies:
                arrays, amaxes = self._at_rest(copy, shard, amaxes, None)
                found.append(arrays)
        return Resting(tuple(found))

    def _copy(
        self, number: int, shard: jax.Array | Resting, amaxes: Amaxes, factor: jax.Array | None
    ) -> tuple[Gathered, Amaxes]:
        copy = self.copies[number]
        if isinstance(shard, Resting):
            return copy.gathered(shard.copies[number]), amaxes
        if copy.quantizer is None:
            gather_dtype, dtype = map(jnp.dtype, self.dtypes)
            return redistribute(shard.astype(gather_dtype), self.plain, self.names).astype(dtype), amaxes
        arrays, amaxes = self._at_rest(copy, shard, amaxes, factor)
        return copy.gathered(arrays), amaxes

    def _at_rest(
        self, copy: _Copy, shard: jax.Array, amaxes: Amaxes, factor: jax.Array | None
    ) -> tuple[tuple[jax.Array, ...], Amaxes]:
        """The arrays of a copy of a shard, and all amaxes that are agreed on now."""
        operand = self._narrow(shard, copy.product)
        place: tuple[Product, Operand] = (copy.product, "weight")
        key = self.low.same_amax.get(place, place)
        agreed = amaxes[key] if key in amaxes else agreed_amax(operand, self.low, place)
        amaxes = amaxes if agreed is None else {**amaxes, key: agreed}
        if factor is not None and factor.ndim:
            factor = lax.dynamic_slice_in_dim(factor, index_of(self.expert_axes) * len(operand), len(operand))
        return copy.at_rest(operand, agreed, factor), amaxes

    def _narrow(self, shard: jax.Array, product: Product) -> jax.Array:
        """The shard as a product's operand, as it would be after a gather."""
        gather_dtype, dtype = map(jnp.dtype, self.dtypes)
        return self._operand(shard.astype(gather_dtype).astype(dtype), product)

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

    def at_rest(self, operand: jax.Array, agreed: jax.Array | None, factor: jax.Array | None) -> tuple[jax.Array, ...]:
        """Codes and scales as they are sent. ``factor``: of each tensor with a delayed amax."""
        quantizer = self.quantizer
        assert quantizer is not None

        def agree(amax: jax.Array, of: Shares) -> jax.Array:
            return amax if agreed is None or of != shared_by(quantizer) else agreed.reshape(amax.shape)

        own = quantize(operand, quantizer, ARRAYS, agree=agree, factor=factor if quantizer.amax == "delayed" else None)
        scales = ARRAYS.bytes_of(own.scales) if quantizer.scale.dtype == E8M0 else own.scales
        return (own.codes, scales, *(() if own.of_tensor is None else (own.of_tensor,)))

    def gathered(self, arrays: tuple[jax.Array, ...]) -> Quantized:
        quantizer = self.quantizer
        assert quantizer is not None
        found = [redistribute(array, *steps) for array, steps in zip(arrays, self.arrays, strict=True)]
        as_bytes = quantizer.scale.dtype == E8M0
        scales = lax.bitcast_convert_type(found[1], jnp.dtype(E8M0)) if as_bytes else found[1]
        return Quantized(codes=found[0], scales=scales, of_tensor=found[2] if len(found) > 2 else None)


def _steps(array: SentArray, mesh: Mesh) -> tuple[ReshardStep, ...]:
    return (
        *reshard_steps(array.at_rest, array.gathered, (), mesh),
        *reshard_steps(array.gathered, array.in_use, (), mesh),
    )
