"""Which experts the tokens of a batch choose under a plan, and by how much they are chosen.

The engine's own forward pass, its layers one after the other and not in a loop, so that what the router of each layer
says can be handed out.
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
from shardwright.engine_jax.experts import moe, routing
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.lowering.shardings import weight_shardings
from shardwright.engine_jax.model import forward as engine_forward
from shardwright.engine_jax.training.state import State
from shardwright.engine_jax.training.step import batch_sharding
from tests.engine_jax.made_rows import Batch

Arrays = Mapping[str, jax.Array]


class ExpertAssignments(NamedTuple):
    """Of one batch: the experts of each token in each layer, in no order, NBLK; and by how much the least of them
    was above the first that was not chosen, NBL."""

    experts_NBLK: np.ndarray
    margins_NBL: np.ndarray


def assignments_of(plan: Plan) -> Callable[[State, Batch], ExpertAssignments]:
    """``f(state, batch)``: what the tokens of a batch choose, with the rows laid out as the plan wants them."""
    one_pass = make_plan(replace(plan.request, microbatches=1, remat="none"))
    mesh, links = device_mesh(plan.mesh), links_of(one_pass)
    table = plan.request.table

    def chosen(params: Arrays, batch: Arrays) -> tuple[jax.Array, jax.Array]:
        with _handed_out() as found:
            engine_forward.forward(params, batch, table, links, remat="none")
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
            chosen,
            mesh=mesh,
            in_specs=(params, dict.fromkeys(fields, sharding.spec)),
            out_specs=(by_token, by_token),
            check_vma=False,
        )
    )

    def choose(state: State, batch: Batch) -> ExpertAssignments:
        placed = {name: jax.device_put(array, sharding) for name, array in batch.items()}
        experts, margins = compiled({**state.weights, **state.buffers}, placed)
        return ExpertAssignments(np.sort(np.asarray(experts), axis=-1), np.asarray(margins))

    return choose


@contextmanager
def _handed_out() -> Iterator[list[tuple[jax.Array, jax.Array]]]:
    """While a forward pass is traced: the experts of each layer's tokens, BLK, and their margins, BL."""
    found: list[tuple[jax.Array, jax.Array]] = []
    margins: list[jax.Array] = []
    route, largest = routing.route, routing.largest

    def seen_largest(x: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
        # Over groups' sums and over experts; the best of each group's own are summed, and no choice.
        if x.ndim == 3 and num < x.shape[-1]:
            values, _ = largest(x, num + 1)
            margins.append(values[..., num - 1] - values[..., num])
        return largest(x, num)

    def seen_route(*arguments: Any) -> routing.Routing:
        margins.clear()
        result = route(*arguments)
        found.append((result.experts_BLK, jnp.min(jnp.stack(margins), axis=0)))
        return result

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(routing, "largest", seen_largest)
        patched.setattr(moe, "route", seen_route)
        lax = SimpleNamespace(scan=_one_by_one)
        patched.setattr(engine_forward, "jax", SimpleNamespace(lax=lax, Array=jax.Array))
        yield found


def _one_by_one(layer: Callable[[Any, Any], tuple[Any, Any]], carried: Any, stacked: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` as a loop in Python; what layers hand out is left behind."""
    given = None
    for number in range(len(jax.tree.leaves(stacked)[0])):
        carried, given = layer(carried, jax.tree.map(lambda leaf, number=number: leaf[number], stacked))
    return carried, given
