"""Policies of recomputation on JAX: what JAX saves for a backward pass is what the plan counts, and nothing kept is computed again.

The oracle is JAX: the arrays that the transposed program closes over, and the products in the program that it lowers to.
"""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from shardwright.core.plan.memory import kept_runs, saved_by_layers
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.cost.steps.flops import step_products
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.model.ends import loss_of
from shardwright.engine_jax.model.forward import through_layers
from shardwright.layouts import load_layout
from shardwright.models import build
from shardwright.models.layers.decoder import walk_of
from shardwright.models.layers.ends import BATCH_FIELDS
from tests.matrix import rest

ROWS, LENGTH = 2, 256
LAYERS = {"llama3-test": "4", "mixtral-test": "4", "deepseek3-test": "4"}


@cache
def plan_of(model: str, remat: str) -> Plan:
    table = build(model, {"num_layers": LAYERS[model]})
    sizes = {"fsdp": 1}
    return make_plan(
        Request(layout=load_layout("fsdp"), table=table, batch=ROWS, length=LENGTH, mesh_sizes=sizes, remat=remat)
    )


def traced(plan: Plan, of_pull):
    """A function of the loss and its pullback, with the shapes of its operands."""
    table, links = plan.request.table, links_of(plan)
    runs = kept_runs(plan.request, plan.mesh, plan.tensors)
    arrays = {row.name: jax.ShapeDtypeStruct(row.stacked_shape, jnp.float32) for row in plan.weights}
    frozen = {weight.name: arrays.pop(weight.name) for weight in table.weights if weight.frozen}
    batch = {
        name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.bool_ if name == "valid" else jnp.int32) for name in BATCH_FIELDS
    }

    def run(weights, frozen, batch):
        def loss(weights):
            params = {**weights, **frozen}
            last = through_layers(params, batch, table, links, runs=runs)
            return loss_of(last.x_BLM, params, last.tied, batch, walk_of(table.architecture), links)

        return of_pull(*jax.vjp(loss, weights))

    spec = PartitionSpec()
    mesh = jax.make_mesh((1,), ("fsdp",))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return mapped, (arrays, frozen, batch)


def saved_bytes(plan: Plan) -> int:
    """Bytes of what JAX saves of layers, without their weights."""
    mapped, operands = traced(plan, lambda _, pull: jax.tree.leaves(pull))
    counts = {len(run.layers) for run in kept_runs(plan.request, plan.mesh, plan.tensors)}
    # Several runs pass the whole stack on, where its gradients are written. XLA drops what is not read of it (test_scan.py).
    weights = {shape for row in plan.weights for shape in (row.shape, row.stacked_shape)}
    return sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.eval_shape(mapped, *operands)
        if leaf.ndim > 2 and leaf.shape[0] in counts and leaf.shape[1:] not in weights
    )


@cache
def products(remat: str) -> int:
    plan = plan_of("llama3-test", remat)
    mapped, operands = traced(plan, lambda loss, pull: pull(jnp.ones_like(loss)))
    return jax.jit(mapped).lower(*operands).as_text().count("stablehlo.dot_general")


KEPT = "keep=attention.attended,attention.keys,mlp.gate"


@pytest.mark.parametrize(
    ("model", "remat"),
    [
        ("llama3-test", "dots"),
        ("llama3-test", KEPT),
        ("llama3-test", "none@0:3+full"),
        rest("llama3-test", "full"),
        rest("llama3-test", "none"),
        rest("llama3-test", "none,recompute=mlp.hidden,attention.output"),
        rest("llama3-test", "keep=residual.middle,mlp.input,attention.projected"),
        rest("mixtral-test", "dots"),
        rest("mixtral-test", "keep=moe.gate,moe.up,moe.dispatched"),
        ("deepseek3-test", "dots"),
        rest("deepseek3-test", "keep=attention.latent,attention.query_latent,shared.up,moe.dispatched"),
    ],
)
def test_jax_saves_what_the_plan_counts(model: str, remat: str) -> None:
    plan = plan_of(model, remat)
    runs = kept_runs(plan.request, plan.mesh, plan.tensors)
    assert saved_bytes(plan) == saved_by_layers(plan.request, plan.mesh, plan.tensors, runs)


@pytest.mark.parametrize("remat", ["keep=mlp.gate,mlp.up", "keep=attention.queries,attention.projected"])
def test_no_product_that_is_kept_is_computed_again(remat: str) -> None:
    """Layers are one loop, so that a product that is computed again is one more in the program."""
    full, kept = plan_of("llama3-test", "full"), plan_of("llama3-test", remat)
    assert products("full") - products(remat) == 2
    again = [
        {one.weight for one in step_products(plan) if one.phase == "recompute" and one.flops} for plan in (full, kept)
    ]
    assert len(again[0] - again[1]) == 2
