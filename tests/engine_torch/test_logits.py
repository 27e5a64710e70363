"""The mathematics on one device against ``transformers``: logits, and documents that do not attend to each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.core.policies.runs import runs_of
from shardwright.engine_jax.model.forward import forward
from shardwright.engine_torch.attention import attend
from shardwright.engine_torch.attention.scores import accumulate_attention, normalized
from shardwright.models import build
from tests.engine_jax.one_device import one_device_links
from tests.engine_torch.logits import our_logits, plan_of_one_rank
from tests.models.published import CASES, LENGTH, ROWS, TOLERANCE, one_document, packed, published_logits
from tests.models.random_weights import random_weights


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("model", "overrides"), CASES.values(), ids=CASES.keys())
def test_logits(model: str, overrides: dict[str, str], tmp_path: Path) -> None:
    table = build(model, {"num_layers": "3", **overrides})
    weights = random_weights(table)
    tokens = np.random.default_rng(1).integers(0, table.sizes["vocab"], (ROWS, LENGTH))
    theirs = published_logits(table, weights, tokens, tmp_path)
    ours = our_logits(plan_of_one_rank(table, ROWS, LENGTH), weights, {"tokens": tokens})
    assert np.std(theirs) > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


NEAR, BY_KERNEL = 0.002, 0.012
"""Bounds of the difference of logits whose standard deviation is 1. From float32 to bfloat16 they differ by 0.013 to 0.016."""


@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("llama3-test", {"num_layers": "1"}),
        (
            "deepseek3-test",
            {"num_layers": "2", "num_experts": "8", "top_k": "8", "num_groups": "1", "num_chosen_groups": "1"},
        ),
    ],
)
def test_in_bfloat16_both_engines_round_the_same_numbers(
    model: str, overrides: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the attention of a ring of one shard; PyTorch's own kernel rounds probabilities elsewhere. XLA must not omit a
    rounding of the program, as it would between operations that it fuses."""
    table = build(model, overrides)
    weights = random_weights(table)
    tokens = np.random.default_rng(1).integers(0, table.sizes["vocab"], (ROWS, LENGTH))
    arrays = {name: jnp.asarray(array) for name, array in weights.items()}
    fields = {
        name: jnp.asarray(array, jnp.int32) for name, array in {**one_document(tokens.shape), "tokens": tokens}.items()
    }
    links = one_device_links(table, batch=ROWS, length=LENGTH, dtype="bfloat16")
    theirs = np.asarray(
        jax.jit(
            lambda params, batch: forward(params, batch, table, links, runs=runs_of(table, "none")).logits_BLV,
            compiler_options={"xla_allow_excess_precision": False},
        )(arrays, fields)
    )
    by_kernel = our_logits(plan_of_one_rank(table, ROWS, LENGTH, "bfloat16"), weights, {"tokens": tokens})
    monkeypatch.setattr(attend, "attend", lambda q, *given: normalized(accumulate_attention(None, q, *given), q.dtype))
    ours = our_logits(plan_of_one_rank(table, ROWS, LENGTH, "bfloat16"), weights, {"tokens": tokens})
    assert np.sqrt(np.mean((ours - theirs) ** 2)) < NEAR
    assert np.sqrt(np.mean((by_kernel - theirs) ** 2)) < BY_KERNEL
    # Logits are not rounded: hardly any of them is a bfloat16 number.
    assert np.mean(ours.view(np.uint32) & 0xFFFF == 0) < 0.01


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_documents_of_one_row_do_not_attend_to_each_other(model: str) -> None:
    table = build(model, {"num_layers": "2"})
    weights = random_weights(table)
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, 2048, 20), rng.integers(0, 2048, 24)
    rows = [packed([first, second]), packed([first]), packed([second])]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    together, alone_first, alone_second = our_logits(plan_of_one_rank(table, *batch["tokens"].shape), weights, batch)
    np.testing.assert_allclose(together[:20], alone_first[:20], rtol=0, atol=2e-5)
    np.testing.assert_allclose(together[20:44], alone_second[:24], rtol=0, atol=2e-5)
