"""The experts that the tokens of a batch are assigned to under a plan, and the margins of these assignments.

It runs the engine's own forward pass, with its layers in a Python loop and not in a scan, so that the results of each
layer's router can be returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.policies.runs import runs_of
from shardwright.engine_jax.experts import route as routing
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.shardings import weight_shardings
from shardwright.engine_jax.model import forward as engine_forward
from shardwright.engine_jax.model import interpreter, scan
from shardwright.engine_jax.training.state import State
from shardwright.engine_jax.training.step import batch_sharding
from tests.engine_jax.made_rows import Batch

Arrays = Mapping[str, jax.Array]


class ExpertAssignments(NamedTuple):
    """Of one batch: the experts of each token in each layer, in no order, NBLK; and the difference between the lowest score of
    these and the highest score of the others, NBL."""

    experts_NBLK: np.ndarray
    margins_NBL: np.ndarray


def assignments_of(plan: Plan) -> Callable[[State, Batch], ExpertAssignments]:
    """``f(state, batch)``: the assignments of the tokens of a batch, whose rows are ordered as in the plan."""
    one_pass = make_plan(replace(plan.request, microbatches=1, remat="none"))
    mesh, links = device_mesh(plan.mesh), links_of(one_pass)
    table = plan.request.table

    def assigned(params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        with _recorded() as found:
            engine_forward.forward(params, batch, table, links, runs=runs_of(table, "none"))
        experts, margins = zip(*found, strict=True)
        return jnp.stack(experts), jnp.stack(margins)

    tokens = one_pass.by_name["router.input"].in_use
    rows, columns = (mesh_axes or None for mesh_axes in (tokens.axes_of("batch"), tokens.axes_of("length")))
    by_token = PartitionSpec(None, rows, columns)
    params = {name: sharding.spec for name, sharding in weight_shardings(plan, mesh).items()}
    sharding = batch_sharding(plan, mesh)
    fields = ("tokens", "targets", "positions", "segments", "valid")
    compiled = jax.jit(
        jax.shard_map(
            assigned,
            mesh=mesh,
            in_specs=(params, dict.fromkeys(fields, sharding.spec)),
            out_specs=(by_token, by_token),
            check_vma=False,
        )
    )

    def assign(state: State, batch: Batch) -> ExpertAssignments:
        placed = {name: jax.device_put(array, sharding) for name, array in batch.items()}
        experts, margins = compiled({**state.weights, **state.buffers}, placed)
        return ExpertAssignments(np.sort(np.asarray(experts), axis=-1), np.asarray(margins))

    return assign


@contextmanager
def _recorded() -> Iterator[list[tuple[jax.Array, jax.Array]]]:
    """A context that records, while a forward pass is traced, the experts of each layer's tokens, BLK, and their margins, BL."""
    found: list[tuple[jax.Array, jax.Array]] = []
    margins: list[jax.Array] = []
    route, top_k = routing.route, routing.top_k

    def recorded_top_k(x: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
        # It selects groups by their sums, and experts. The largest scores inside each group are only summed: no selection.
        if x.ndim == 3 and num < x.shape[-1]:
            values, _ = top_k(x, num + 1)
            margins.append(values[..., num - 1] - values[..., num])
        return top_k(x, num)

    def recorded_route(*arguments: Any) -> routing.Routing:
        margins.clear()
        result = route(*arguments)
        found.append((result.experts_BLK, jnp.min(jnp.stack(margins), axis=0)))
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "top_k", recorded_top_k)
        patched.setattr(interpreter, "route", recorded_route)
        lax = SimpleNamespace(**{**vars(jax.lax), "scan": _one_by_one})
        patched.setattr(scan, "jax", SimpleNamespace(**{**vars(jax), "lax": lax}))
        yield found


def _one_by_one(layer: Callable[[Any, Any], tuple[Any, Any]], carried: Any, stacked: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` as a loop in Python; it returns the outputs of the last layer only."""
    output = None
    for number in range(len(jax.tree.leaves(stacked)[0])):
        carried, output = layer(carried, jax.tree.map(lambda leaf, number=number: leaf[number], stacked))
    return carried, output
