"""Weights that a rule leaves unsharded on an axis that shards their activations: each device multiplies with its slice.

The loss and every gradient of a step are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
import pytest

from shardwright import Request, make_plan
from shardwright.core.layout.reading import read_layout
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.step import gradient_function
from shardwright.files import parse_yaml
from shardwright.models import build
from tests.matrix import rest
from tests.models.random_weights import random_weights

ROWS, LENGTH = 4, 16
ONE_DEVICE = "mesh: {fsdp: 1}\nroles: {fsdp: fsdp}\n"
TENSOR = "mesh: {fsdp: 2, tensor: 4}\nroles: {fsdp: {elsewhere: fsdp, weights: whole}, tensor: tensor}\n"


def loss_and_gradients(layout: str, *, tied: bool = False) -> Mapping[str, np.ndarray]:
    sizes = {"num_layers": "1", "embed": "32", "mlp": "64", "vocab": "64", "num_heads": "8", "num_kv_heads": "4"}
    table = build("llama3-test", {**sizes, "head_dim": "8", "tied": str(tied).lower()})
    read = read_layout(parse_yaml(f"name: mine\n{layout}", "mine.yaml"))
    plan = make_plan(Request(layout=read, table=table, batch=ROWS, length=LENGTH))
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 64, (ROWS, LENGTH)).astype(np.int32) for name in ("tokens", "targets")}
    batch["positions"] = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    batch["segments"] = np.ones((ROWS, LENGTH), np.int32)
    batch["valid"] = rng.random((ROWS, LENGTH)) < 0.7
    made = jax.jit(gradient_function(plan, device_mesh(plan.mesh)))(random_weights(table), {}, batch)
    return {"loss": np.asarray(made.loss)} | {name: np.asarray(gradient) for name, gradient in made.by_weight.items()}


@pytest.mark.parametrize(
    ("rule", "tied"),
    [
        ("embedding: {vocab: []}", False),
        ("logits: {vocab: []}", False),
        ("embedding: {vocab: []}", True),
        rest("mlp: {mlp: []}", False),
        rest("attention: {heads: []}", False),
        ("attention: {heads: [], kv_heads: []}", False),
    ],
)
def test_each_device_multiplies_with_its_slice(rule: str, tied: bool) -> None:
    ours = loss_and_gradients(f"{TENSOR}rules: {{{rule}}}\n", tied=tied)
    for name, expected in loss_and_gradients(ONE_DEVICE, tied=tied).items():
        assert np.linalg.norm(ours[name] - expected) <= 1e-5 * np.linalg.norm(expected), name
