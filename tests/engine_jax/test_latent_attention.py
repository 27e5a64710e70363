"""Latent attention over a row that is cut: the latent crosses the links, and never the keys and values made of it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from shardwright.engine_jax.attention import Sight, attention
from shardwright.engine_jax.layer_io import Pieces, stay
from shardwright.engine_jax.rotary import angles
from shardwright.models import build
from tests.models.random_weights import random_weights

ROWS, LENGTH = 2, 16
UNOPTIMISED = {"xla_backend_optimization_level": 0}


def test_only_the_latent_crosses_the_links() -> None:
    table = build("deepseek3-test", {"num_layers": "2", "embed": "32", "nope_dim": "32", "rope_dim": "8"})
    architecture, prefix = table.architecture, "moe_layers."
    weights = {
        name.removeprefix(prefix): array[0]
        for name, array in random_weights(table).items()
        if name.startswith(f"{prefix}attention.")
    }
    positions_BL = np.tile(np.concatenate([np.arange(10), np.arange(6)]), (ROWS, 1))
    segments_BL = np.tile(np.repeat([1, 2], [10, 6]), (ROWS, 1))
    x_BLM = np.random.default_rng(0).normal(size=(ROWS, LENGTH, 32)).astype(np.float32)

    def loss(x_BLM, weights, place, pieces: Pieces):
        sight = Sight(*map(jnp.asarray, (positions_BL, segments_BL, positions_BL, segments_BL)))
        turned_by = angles(architecture.rope, architecture.attention.rotary_dim, sight.positions_BL)
        return jnp.sum(jnp.sin(attention(x_BLM, weights, architecture, turned_by, sight, place, pieces)))

    def slope(place, pieces: Pieces, **options):
        gradient = jax.value_and_grad(lambda x, w: loss(x, w, place, pieces), argnums=(0, 1))
        return jax.jit(gradient, compiler_options=UNOPTIMISED, **options)

    mesh = jax.make_mesh((2, 4), ("fsdp", "context"), axis_types=(AxisType.Auto,) * 2)
    on_tokens = NamedSharding(mesh, PartitionSpec("fsdp", "context"))
    whole_rows = NamedSharding(mesh, PartitionSpec("fsdp"))

    def place(name: str, array: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(array, whole_rows if name.endswith("_attended") else on_tokens)

    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = (on_tokens, dict.fromkeys(weights, everywhere))
    cut = slope(place, Pieces(num=4, axes=("context",)), in_shardings=shardings)
    compiled = cut.lower(x_BLM, weights).compile()
    results = re.findall(r"= (.*?) all-(?:gather|reduce|to-all)(?:-start)?\(", compiled.as_text())
    # XLA joins collectives that could go together into one with several results.
    shapes = [shape for result in results for shape in re.findall(r"f32\[([\d,]*)\]", result)]
    of_rows = [shape for shape in shapes if shape.startswith(f"{ROWS // 2},{LENGTH},")]
    assert of_rows == [f"{ROWS // 2},{LENGTH},{architecture.attention.latent}"] * 2

    expected = slope(stay, Pieces())(x_BLM, weights)
    ours = compiled(*jax.device_put((x_BLM, weights), shardings))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), ours, expected)
