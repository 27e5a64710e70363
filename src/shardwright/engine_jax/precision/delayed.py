"""Delayed scaling in a step: the amaxes leave the layers by the backward pass, and the state follows from them.

A factor enters a product with its operands, and what the backward pass of the product returns for it is the amax of the tensor.
The amax comes so out of the scan over layers, layer by layer, however much of the layer is recomputed. Cotangents of several uses are
added, so that only the first weight of a tensor returns an amax, the others return zeros; and a product that is computed
several times in a layer gets its factors from ``several``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.delayed import FACTOR, HISTORY, DelayedScale
from shardwright.core.recipes.delayed import Delayed, after_step
from shardwright.core.recipes.formula import amax_of
from shardwright.core.recipes.recipe import Operand, Quantizer
from shardwright.engine_jax.io.layer_io import LowPrecision, Site
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.precision.arrays import ARRAYS

Arrays = Mapping[str, jax.Array]
NO_SIGN = 0x7FFFFFFF
"""Sums of NaN may have one."""


def amax_of_all(x: jax.Array, quantizer: Quantizer) -> jax.Array:
    """The amax of all elements, int32."""
    return amax_of(x.reshape(1, -1), quantizer, ARRAYS)


def amaxes_of_step(
    low: LowPrecision, site: Site, amax_by_operand: Mapping[Operand, Callable[[Quantizer], jax.Array]]
) -> Site:
    """The cotangent of a site: the amaxes of the operands of which this weight is the first one, and zeros."""
    found = {name: jnp.zeros_like(factor) for name, factor in site.factors.items()}
    for (product, operand), name in low.delayed.items():
        # A weight that is gathered as codes has returned its amax where it was quantized.
        if name == f"{low.name}.{operand}" and operand in amax_by_operand:
            amax = amax_by_operand[operand](low.quantizers[product, operand])
            found[name] = ARRAYS.of_bits(amax).reshape(site.factors[name].shape)
    return Site(seed=None, step=None, microbatch=None, layer=None, factors=found)  # pyright: ignore[reportArgumentType]


def several(low: LowPrecision | None, num: int) -> Sequence[LowPrecision | None]:
    """The low precision of each of ``num`` products with one weight in a layer. Of their amaxes the largest counts."""
    if low is None or not low.delayed or num == 1:
        return [low] * num
    factors = [_spread(factor, num) for factor in low.site.factors.values()]
    return [
        replace(low, site=low.site._replace(factors=dict(zip(low.site.factors, of_one, strict=True))))
        for of_one in zip(*factors, strict=True)
    ]


def _spread(factor: jax.Array, num: int) -> tuple[jax.Array, ...]:
    @jax.custom_vjp
    def spread(factor: jax.Array) -> tuple[jax.Array, ...]:
        return (factor,) * num

    def backward(_: None, amaxes: tuple[jax.Array, ...]) -> tuple[jax.Array]:
        return (reduce(jnp.maximum, amaxes),)

    spread.defvjp(lambda factor: (spread(factor), None), backward)
    return spread(factor)


def factors_of(state: Arrays) -> Arrays:
    """The factors among the tensors of a state, by the names of their delayed scales."""
    return {name.removeprefix(FACTOR): array for name, array in state.items() if name.startswith(FACTOR)}


def reduced_amaxes(scales: Sequence[DelayedScale], amaxes: Arrays) -> Arrays:
    """The amaxes of a step, int32, after every reduction that the plan has: one for each set of axes."""
    bits = {one.name: ARRAYS.bits(amaxes[one.name]) & NO_SIGN for one in scales}
    by_axes: dict[tuple[str, ...], list[DelayedScale]] = {}
    for one in scales:
        if one.operand.reduced:
            by_axes.setdefault(one.operand.reduced, []).append(one)
    for axes, found in by_axes.items():
        first = found[0].weight
        with of_component(first.component), of_tensor(first.name):
            largest = lax.pmax(jnp.concatenate([bits[one.name].reshape(-1) for one in found]), axes)
        sizes = [bits[one.name].size for one in found]
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes) - 1)]
        for one, part in zip(found, jnp.split(largest, ends), strict=True):
            bits[one.name] = part.reshape(bits[one.name].shape)
    return bits


def updated(plan: Plan, state: Arrays, amaxes: Arrays, step: jax.Array) -> Arrays:
    """The tensors that a run keeps for delayed amaxes, after a step. ``step``: the number of this one, from 1."""
    recipe, found = plan.request.precision, dict(state)
    for one in plan.delayed:
        assert recipe is not None
        assert recipe.history is not None
        before = Delayed(factor=state[FACTOR + one.name], history=state[HISTORY + one.name])
        after = after_step(before, amaxes[one.name], one.operand.quantizer, recipe.history, step, ARRAYS)
        found |= {FACTOR + one.name: after.factor, HISTORY + one.name: after.history}
    return found
