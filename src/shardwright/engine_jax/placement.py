"""Where the mathematics meets the plan: named activations are constrained, weights are brought from rest into use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from shardwright.core.gradients import partial_axes
from shardwright.core.plan import Plan
from shardwright.core.spec import Spec
from shardwright.engine_jax.layer_io import Place, Use
from shardwright.engine_jax.shardings import named_sharding


def activation_placer(plan: Plan, mesh: Mesh) -> Place:
    """``place(name, array)``: the array, constrained to the plan's spec of that activation.

    What is still partial over an axis is left to the next place: a constraint here would sum it twice as wide as
    the reduce-scatter that its move asks for.
    """
    partial_sources = {
        move.source
        for move in plan.request.table.moves
        if plan.mesh.larger_than_one(partial_axes(plan.request.layout, move.summed))
    }
    shardings = {
        row.name: named_sharding(row.in_use, mesh) for row in plan.activations if row.name not in partial_sources
    }

    def place(name: str, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, shardings[name]) if name in shardings else array

    return place


def weight_user(plan: Plan, mesh: Mesh) -> Use:
    """``use(name, weight)``: one layer of a weight in the dtype and the place in which the computation sees it.

    It is cast before it is gathered, so the links carry the narrower type; its gradient is cast and placed as the
    weight rests, so what is summed is scattered at once.
    """
    dtypes = {weight.name: weight.in_use_dtype or plan.request.dtype for weight in plan.request.table.weights}
    uses: dict[str, Callable[[jax.Array], jax.Array]] = {}
    for row in plan.weights:
        assert row.at_rest is not None
        one_layer = slice(len(row.at_rest.dims) - len(row.shape), None)
        rest = named_sharding(Spec(row.at_rest.dims[one_layer]), mesh)
        use = named_sharding(Spec(row.in_use.dims[one_layer]), mesh)
        uses[row.name] = partial(_bring_into_use, rest, use, dtypes[row.name], row.dtype)

    def place(name: str, weight: jax.Array) -> jax.Array:
        return uses[name](weight)

    return place


def _bring_into_use(
    rest: NamedSharding, use: NamedSharding, dtype: str, dtype_at_rest: str, weight: jax.Array
) -> jax.Array:
    @jax.custom_vjp
    def bring(array: jax.Array) -> jax.Array:
        cast = jax.lax.with_sharding_constraint(array.astype(jnp.dtype(dtype)), rest)
        return jax.lax.with_sharding_constraint(cast, use)

    def forward(array: jax.Array) -> tuple[jax.Array, None]:
        return bring(array), None

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        # First as it is in use: its parts are summed there. Asked only for where it rests, the compiler may move
        # activations in place of gradients (it does so for the scatter of an embedding, through whole copies).
        summed = jax.lax.with_sharding_constraint(gradient.astype(jnp.dtype(dtype_at_rest)), use)
        return (jax.lax.with_sharding_constraint(summed, rest),)

    bring.defvjp(forward, backward)
    return bring(weight)
