"""The mathematics and the tables against ``transformers``: logits, parameter counts and published names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from shardwright.models import build, names
from tests.engine_jax.logits import our_logits
from tests.models.published import (
    CASES,
    LENGTH,
    ROWS,
    TOLERANCE,
    model_class,
    packed,
    published_config,
    published_logits,
)
from tests.models.random_weights import random_weights
from tests.models.to_published import to_published


@pytest.mark.parametrize(("model", "overrides"), CASES.values(), ids=CASES.keys())
def test_logits(model: str, overrides: dict[str, str], tmp_path: Path) -> None:
    table = build(model, {"num_layers": "3", **overrides})
    weights = random_weights(table)
    tokens = np.random.default_rng(1).integers(0, table.sizes["vocab"], (ROWS, LENGTH))
    theirs = published_logits(table, weights, tokens, tmp_path)
    ours = our_logits(table, weights, {"tokens": tokens})
    assert np.std(theirs) > 0.5
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model", names())
def test_parameter_counts_and_names(model: str) -> None:
    table = build(model)
    with torch.device("meta"):
        theirs = model_class(config := published_config(table.architecture))(config)
    assert table.num_parameters == sum(parameter.numel() for parameter in theirs.parameters())
    theirs_by_name = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    for weight in table.weights:
        # Experts are published one by one; transformers stores them in one tensor.
        if weight.stack and weight.component != "moe":
            array = np.broadcast_to(np.float32(0), (weight.num, *weight.shape))
            for name, part in to_published(weight, array):
                held = name.replace("block_sparse_moe", "mlp")
                assert theirs_by_name[held] == part.shape, name


@pytest.mark.parametrize("model", ["llama3-test", "mixtral-test", "deepseek3-test"])
def test_documents_of_one_row_do_not_attend_to_each_other(model: str) -> None:
    table = build(model, {"num_layers": "2"})
    weights = random_weights(table)
    rng = np.random.default_rng(2)
    first, second = rng.integers(0, 2048, 20), rng.integers(0, 2048, 24)
    rows = [packed([first, second]), packed([first]), packed([second])]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    together, alone_first, alone_second = our_logits(table, weights, batch)
    np.testing.assert_allclose(together[:20], alone_first[:20], rtol=0, atol=2e-5)
    np.testing.assert_allclose(together[20:44], alone_second[:24], rtol=0, atol=2e-5)
