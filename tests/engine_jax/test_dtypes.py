"""The dtypes in which JAX's step sends and sums, with bfloat16 as the dtype of the computation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import PartitionSpec

from shardwright.core.model.precision import PRECISION, dtype_of
from shardwright.core.plan.plan import Plan
from shardwright.core.planning import make_plan
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.layers.embedding import rows_of
from shardwright.engine_jax.lowering.links import links_of
from shardwright.engine_jax.training.state import abstract_state
from shardwright.engine_jax.training.step import abstract_batch, gradient_function, mean_of
from tests.engine_jax.steps import Case, plan_of
from tests.sameness.cases import DEEPSEEK3, LLAMA3, MIXTRAL, case

MOVING = {"psum", "all_gather", "reduce_scatter", "all_to_all", "ppermute", "ragged_all_to_all"}

CASES = (
    case(LLAMA3, "fsdp-tp", "fsdp=2,tensor=2", settings="tied=true"),
    case(MIXTRAL, "ep-as-cp", "fsdp=2,expert=2", "attention=ring,moe=ring"),
    case(DEEPSEEK3, "ep-tp", "fsdp=2,expert=2,tensor=2", "attention=ulysses"),
)


def narrow(one: Case, **options: str) -> Plan:
    return make_plan(replace(plan_of(one).request, dtype="bfloat16", **options))  # pyright: ignore[reportArgumentType]


def collectives(jaxpr, around: str = "") -> Iterator[tuple[str, str, str]]:
    """Operation, dtype, and the tensor of the innermost scope, for each collective of floats."""
    for equation in jaxpr.eqns:
        name, scope = equation.primitive.name.removesuffix("_invariant"), f"{around}/{equation.source_info.name_stack}"
        tensors = re.findall(r"tensor=([\w.]+)", scope)
        for operand in equation.invars if name in MOVING else ():
            if jnp.issubdtype(operand.aval.dtype, jnp.floating):
                yield name, operand.aval.dtype.name, tensors[-1] if tensors else ""
        for inside in jaxprs_in_params(equation.params):
            yield from collectives(inside, scope)


def expected(plan: Plan, name: str, tensor: str) -> str:
    """The dtype by the table: that in which a weight is gathered or its gradient summed, or in which an activation is kept."""
    if not tensor:
        # A ring's keys, or the sums of the loss.
        word = PRECISION["product" if name == "ppermute" else "loss"].sent
        assert word is not None
        return dtype_of(word, computation=plan.request.dtype)
    row = plan.by_name[tensor]
    if row.kind == "activation":
        return row.dtype
    of = PRECISION["weight"].sent if name == "all_gather" else PRECISION["gradient"].summed
    assert of is not None
    in_use = plan.request.table.weight(tensor).in_use_dtype or "bfloat16"
    return dtype_of(of, in_use=in_use, at_rest=row.dtype, gradients=plan.request.summed_in)


@pytest.mark.parametrize(
    ("one", "weights_dtype"),
    [*((one, "float32") for one in CASES), (CASES[0], "bfloat16")],
    ids=lambda given: given if isinstance(given, str) else f"{given.model} {given}",
)
def test_collectives_have_the_dtype_of_the_table(one: Case, weights_dtype: str) -> None:
    plan = narrow(one, weights_dtype=weights_dtype)
    mesh = device_mesh(plan.mesh)
    state = abstract_state(plan, mesh)
    traced = jax.make_jaxpr(gradient_function(plan, mesh))(state.weights, state.buffers, abstract_batch(plan, mesh))
    found = set(collectives(traced.jaxpr))
    wrong = [(name, dtype, tensor) for name, dtype, tensor in found if dtype != expected(plan, name, tensor)]
    assert not wrong
    gathered = {
        name
        for row in plan.collectives
        if row.phase == "backward"
        for name in row.tensors
        if plan.by_name[name].gradient
    }
    assert gathered <= {tensor for _, _, tensor in found}


def test_a_frequent_token_gets_the_sum_of_all_its_cotangents() -> None:
    """One row with a thousand cotangents of 1: in bfloat16 the sum would stop at 256."""
    ids_BL = jnp.zeros((1, 1000), jnp.int32)
    cotangent = jax.grad(lambda table_VM: jnp.sum(rows_of(table_VM, ids_BL).astype(jnp.float32)))
    np.testing.assert_array_equal(cotangent(jnp.ones((4, 2), jnp.bfloat16)).astype(jnp.float32)[0], 1000)


def test_both_uses_of_a_tied_weight_are_summed_in_the_dtype_at_rest() -> None:
    """1 and 1/1024 on each of four devices: in bfloat16 their sum would be 1."""
    plan = narrow(case(LLAMA3, "fsdp", "fsdp=4", settings="tied=true"))
    links, mesh, row = links_of(plan), device_mesh(plan.mesh), plan.by_name["embedding.tokens"]

    def loss(weight: jax.Array) -> jax.Array:
        first, second = links.use_twice("embedding.tokens", weight)
        assert first.dtype == second.dtype == jnp.bfloat16
        return jnp.sum(first.astype(jnp.float32)) + jnp.sum(second.astype(jnp.float32)) / 1024

    spec = PartitionSpec(*(dim.axes or None for dim in row.at_rest.dims)) if row.at_rest else PartitionSpec()
    cotangent = jax.jit(jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    np.testing.assert_array_equal(cotangent(jnp.zeros(row.shape)), 4 * (1 + 1 / 1024))


def test_a_mean_is_over_the_tokens_that_there_are() -> None:
    """bfloat16 has no 257, nor any odd number above 256."""
    mean = mean_of(jnp.asarray(256.0, jnp.bfloat16), jnp.asarray(257.0))
    assert (mean.dtype, mean) == (jnp.bfloat16, jnp.asarray(256 / 257, jnp.bfloat16))
