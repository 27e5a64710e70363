"""Weights that rest as codes and scales: what a state has in their place, made of the weights after each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from shardwright.core.plan.plan import Plan
from shardwright.core.quantization.quantized import QuantizedWeight, SentArray
from shardwright.engine_jax.io.layer_io import Resting
from shardwright.engine_jax.lowering.links import coded_gathers
from shardwright.engine_jax.lowering.shardings import named_sharding, partition_spec

Arrays = Mapping[str, jax.Array]


def resting_names(plan: Plan) -> tuple[str, ...]:
    """The weights that rest as codes."""
    return tuple(one.name for one in plan.quantized if one.rests)


def abstract_resting(plan: Plan, mesh: Mesh) -> Mapping[str, Resting]:
    """The shapes, dtypes and shardings of what rests, layers stacked."""
    return _of_arrays(plan, lambda one, array: _abstract(plan, mesh, one, array))


def resting(plan: Plan, mesh: Mesh) -> Callable[[Arrays], Mapping[str, Resting]]:
    """``f(weights)``: what rests of the weights that do, which are sharded as at rest. Amaxes of all layers are reduced at one time."""
    gathers = coded_gathers(plan)
    stacked = {one.name: one.stack is not None for one in plan.quantized if one.rests}

    def made(weights: Arrays) -> Mapping[str, Resting]:
        return {
            name: (jax.vmap(gathers[name].resting) if of_layers else gathers[name].resting)(weights[name])
            for name, of_layers in stacked.items()
        }

    if not stacked:
        return made
    mapped: Callable[[Arrays], Mapping[str, Resting]] = jax.shard_map(
        made,
        mesh=mesh,
        in_specs=({name: partition_spec(plan.by_name[name].stacked_at_rest) for name in stacked},),
        out_specs=resting_specs(plan),
        # The plan says what is reduced over which axes, so JAX need not infer it.
        check_vma=False,
    )
    return mapped


def resting_specs(plan: Plan) -> Mapping[str, Resting]:
    """The partition of each array of what rests, layers stacked."""
    return _of_arrays(plan, lambda one, array: partition_spec(_spec(one, array)))


def _of_arrays(plan: Plan, of: Callable[[QuantizedWeight, SentArray], object]) -> Mapping[str, Resting]:
    return {
        one.name: Resting(tuple(tuple(map(partial(of, one), copy.arrays)) for copy in one.copies))
        for one in plan.quantized
        if one.rests
    }


def _abstract(plan: Plan, mesh: Mesh, one: QuantizedWeight, array: SentArray) -> jax.ShapeDtypeStruct:
    del plan
    sharding: NamedSharding = named_sharding(_spec(one, array), mesh)
    shape = tuple(array.shape.values())
    shape = shape if one.stack is None else (one.num, *shape)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(array.dtype), sharding=sharding)


def _spec(one: QuantizedWeight, array: SentArray):
    return array.at_rest if one.stack is None else array.at_rest.prefixed("layers")
