"""Lookup in an embedding whose vocabulary is sharded: each device looks up its own entries, and one all-reduce sums them."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardwright.core.mesh.mesh import Mesh
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.layers.embedding import embed
from tests.engine_jax.program import Program

VOCAB, EMBED, ROWS, LENGTH = 32, 8, 4, 16
MESH = Mesh.of(fsdp=4, tensor=2)


def test_each_device_looks_up_its_own_entries() -> None:
    rng = np.random.default_rng(0)
    table_VM = rng.normal(size=(VOCAB, EMBED)).astype(np.float32)
    tokens_BL = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    cotangent_L = np.arange(1.0, LENGTH + 1, dtype=np.float32)

    @jax.custom_vjp
    def summed(x_BLM):
        return jax.lax.psum(x_BLM, "tensor")

    summed.defvjp(lambda x_BLM: (summed(x_BLM), None), lambda _, cotangent: (cotangent,))

    @partial(
        jax.shard_map,
        mesh=device_mesh(MESH),
        in_specs=(P("tensor"), P("fsdp")),
        out_specs=(P("tensor"), P("fsdp")),
        check_vma=False,
    )
    def gradient(table_VM, tokens_BL):
        def loss(table_VM):
            x_BLM = summed(embed(tokens_BL, table_VM, ("tensor",)))
            return jnp.sum(x_BLM * cotangent_L[None, :, None]), x_BLM

        gradient_VM, x_BLM = jax.grad(loss, has_aux=True)(table_VM)
        return jax.lax.psum(gradient_VM, "fsdp"), x_BLM

    compiled = jax.jit(gradient).lower(table_VM, tokens_BL).compile()
    gradient_VM, x_BLM = jax.jit(gradient)(table_VM, tokens_BL)
    np.testing.assert_array_equal(x_BLM, table_VM[tokens_BL])
    expected_VM = np.zeros_like(table_VM)
    np.add.at(expected_VM, tokens_BL, cotangent_L[None, :, None])
    np.testing.assert_allclose(gradient_VM, expected_VM, rtol=1e-6)
    found = [(one.kind, one.axes) for one in Program(compiled.as_text()).collectives(MESH) for _ in range(one.num_ops)]
    assert sorted(found) == [("all-reduce", ("fsdp",)), ("all-reduce", ("tensor",))]
