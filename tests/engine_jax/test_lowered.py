"""A lowered step, before compilation: the dtypes of its collectives, and the products that are recomputed."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from math import prod

import pytest

from shardwright.core.planning import make_plan
from shardwright.core.resolution.request import Request
from shardwright.engine_jax.io.mesh import device_mesh
from shardwright.engine_jax.training.state import abstract_state
from shardwright.engine_jax.training.step import abstract_batch, train_step
from shardwright.layouts import load_layout
from shardwright.models import build
from tests.engine_jax.steps import OPTIONS

EMBED, HEADS, WIDTH, VOCAB = 64, 4, 96, 256
SIZES = {"num_layers": 1, "embed": EMBED, "num_heads": HEADS, "num_kv_heads": HEADS, "mlp": WIDTH, "vocab": VOCAB}
MATRICES = 2 * VOCAB * EMBED + 4 * EMBED * HEADS * 16 + 3 * EMBED * WIDTH
PRODUCTS, OF_ATTENTION = 7, 2
"""A layer's products with weights; and its products of queries with keys and of probabilities with values."""


@cache
def lowered(**options: str) -> str:
    plan = make_plan(
        Request(
            layout=load_layout("fsdp"),
            table=build("llama3-test", {name: str(size) for name, size in SIZES.items()}),
            batch=8,
            length=64,
            mesh_sizes={"fsdp": 4},
            **options,  # pyright: ignore[reportArgumentType]
        )
    )
    mesh = device_mesh(plan.mesh)
    return train_step(plan, mesh, OPTIONS).lower(abstract_state(plan, mesh), abstract_batch(plan, mesh)).as_text()


def moved(text: str, kind: str) -> Counter[str]:
    """Elements of the operands or results, whichever are more, of collectives of a kind, by dtype."""
    found: Counter[str] = Counter()
    for before, after in re.findall(
        rf"stablehlo\.{kind}\".*?: \(tensor<([^>]*)>\) -> tensor<([^>]*)>", text, re.DOTALL
    ):
        *_, dtype = before.split("x")
        assert after.endswith(dtype)
        found[dtype] += max(prod(map(int, one.split("x")[:-1])) for one in (before, after))
    return found


@pytest.mark.parametrize(
    ("dtype", "weights_dtype", "gathered", "summed"),
    [
        ("bfloat16", "float32", "bf16", "f32"),
        ("bfloat16", "bfloat16", "bf16", "bf16"),
        ("float32", "float32", "f32", "f32"),
        # The narrower of the two: a wider dtype of the collective would not make a weight more exact.
        ("float32", "bfloat16", "bf16", "bf16"),
    ],
)
def test_weights_are_gathered_in_the_narrower_dtype_and_gradients_summed_in_that_at_rest(
    dtype, weights_dtype, gathered, summed
):
    text = lowered(dtype=dtype, weights_dtype=weights_dtype, remat="none")
    assert moved(text, "all_gather") == {gathered: MATRICES}
    assert moved(text, "reduce_scatter") == {summed: MATRICES}


def test_remat_recomputes_the_products_of_its_policy():
    def products(remat: str) -> int:
        return lowered(dtype="float32", weights_dtype="float32", remat=remat).count("stablehlo.dot_general")

    # One forward and two backward, for a layer's products and for the logits.
    assert products("none") == 3 * (PRODUCTS + OF_ATTENTION + 1)
    # Products with weights are saved.
    assert products("dots") == products("none") + OF_ATTENTION
    # All but the last one, whose result only the next layer needs.
    assert products("full") == products("none") + OF_ATTENTION + PRODUCTS - 1
