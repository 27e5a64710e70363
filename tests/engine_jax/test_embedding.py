"""Looking up a table whose vocabulary is cut: each piece gives what it has, and one sum crosses the links."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.engine_jax.embedding import embed
from shardwright.engine_jax.layer_io import Pieces

VOCAB, EMBED, ROWS, LENGTH = 32, 8, 4, 16


def test_each_piece_of_the_vocabulary_gives_what_it_has() -> None:
    rng = np.random.default_rng(0)
    table_VM = rng.normal(size=(VOCAB, EMBED)).astype(np.float32)
    tokens_BL = rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    places = {
        "input.tokens": PartitionSpec("fsdp"),
        "residual.stream": PartitionSpec("fsdp", "tensor"),
    }

    def place(name: str, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, places[name])) if name in places else array

    def loss(table_VM, tokens_BL):
        x_BLM = embed(
            tokens_BL, {"embedding.tokens": table_VM}, lambda _, array: array, place, Pieces(num=2, axes=("tensor",))
        )
        return jnp.sum(x_BLM * jnp.arange(1.0, LENGTH + 1)[None, :, None]), x_BLM

    shardings = NamedSharding(mesh, PartitionSpec("tensor")), NamedSharding(mesh, PartitionSpec("fsdp"))
    compiled = jax.jit(jax.grad(loss, has_aux=True), in_shardings=shardings).lower(table_VM, tokens_BL).compile()
    gradient_VM, x_BLM = compiled(*jax.device_put((table_VM, tokens_BL), shardings))
    np.testing.assert_array_equal(x_BLM, table_VM[tokens_BL])
    expected_VM = np.zeros_like(table_VM)
    np.add.at(expected_VM, tokens_BL, np.arange(1.0, LENGTH + 1)[None, :, None])
    np.testing.assert_allclose(gradient_VM, expected_VM, rtol=1e-6)

    kinds = re.findall(r" (all-\w+(?:-\w+)?|reduce-scatter|collective-permute)(?:-start)?\(", compiled.as_text())
    # Forward the sum over the pieces; backward the stream is gathered and the table's gradient summed over rows.
    assert sorted(set(kinds)) in (["all-reduce"], ["all-gather", "all-reduce"])
