"""The update of weights, lowered: how their gradients are reduced over replicas, and which part of a weight a device updates.

The core gives the steps (``core/plan/resharding.py``). Where axes shard the update and not the weight, a device takes its own part of the
weight, and the updated parts are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from shardwright.core.plan.movement import ReshardStep
from shardwright.core.plan.plan import Plan, TensorPlan
from shardwright.core.plan.resharding import weight_update
from shardwright.engine_jax.io.layer_io import Resting
from shardwright.engine_jax.io.redistribute import redistribute
from shardwright.engine_jax.io.scopes import of_component, of_tensor
from shardwright.engine_jax.lowering.shardings import partition_spec

Arrays = Mapping[str, jax.Array]


def reduced(plan: Plan, name: str, gradient: jax.Array) -> jax.Array:
    """A gradient on one device, summed over microbatches: summed over replicas too, and sharded as in the update."""
    row = plan.by_name[name]
    return _moved(row, gradient, weight_update(plan.request, plan.mesh, row).after_them(plan.mesh))


def gradients_apart(plan: Plan, weights: Mapping[str, jax.Array | Resting]) -> Arrays:
    """Zeros like the gradient of one microbatch, on one device, of each weight whose gradient has another shape or dtype than the
    weight, or that rests as codes. ``weights``: local shards at rest."""
    found = {}
    for row in plan.weights:
        update = weight_update(plan.request, plan.mesh, row)
        weight = weights.get(row.name)
        rests = isinstance(weight, Resting)
        if weight is not None and (rests or update.held != update.at_rest or update.dtype != row.dtype):
            shape = _shard_shape(row, plan) if isinstance(weight, Resting) else list(weight.shape)
            for axis in update.scattered:
                dim = update.held.dim_of(axis)
                assert dim is not None, (row.name, axis)
                shape[dim - len(update.held.dims)] //= plan.mesh.size(axis)
            found[row.name] = jnp.zeros(shape, update.dtype)
    return found


def _shard_shape(row: TensorPlan, plan: Plan) -> list[int]:
    dims = zip(row.stacked_shape, row.stacked_at_rest.dims, strict=True)
    return [size // plan.mesh.size(dim.axes) for size, dim in dims]


def own_parts(plan: Plan, mesh: Mesh, weights: Arrays) -> Arrays:
    """The weights, each sharded as in its update. Nothing is sent."""
    return _resharded(plan, mesh, weights, back=False)


def gathered_parts(plan: Plan, mesh: Mesh, parts: Arrays) -> Arrays:
    """The weights at rest of their updated parts."""
    return _resharded(plan, mesh, parts, back=True)


def _resharded(plan: Plan, mesh: Mesh, arrays: Arrays, *, back: bool) -> Arrays:
    rows = {row.name: row for row in plan.weights if row.update_is_sharded and row.name in arrays}
    if not rows:
        return arrays
    at_rest = {name: partition_spec(row.stacked_at_rest) for name, row in rows.items()}
    in_update = {name: partition_spec(row.stacked_updated) for name, row in rows.items()}
    updates = {name: weight_update(plan.request, plan.mesh, row) for name, row in rows.items()}
    steps = {name: one.back(plan.mesh) if back else one.own(plan.mesh) for name, one in updates.items()}

    def reshard(found: Arrays) -> Arrays:
        return {name: _moved(rows[name], array, steps[name]) for name, array in found.items()}

    moved: Callable[[Arrays], Arrays] = jax.shard_map(
        reshard,
        mesh=mesh,
        in_specs=(in_update if back else at_rest,),
        out_specs=at_rest if back else in_update,
        # The plan says what is moved over which axes, so JAX need not infer it.
        check_vma=False,
    )
    return {**arrays, **moved({name: arrays[name] for name in rows})}


def _moved(row: TensorPlan, array: jax.Array, steps: Iterable[ReshardStep]) -> jax.Array:
    with of_component(row.component), of_tensor(row.name):
        return redistribute(array, steps, row.stacked_at_rest.logical_axes)
