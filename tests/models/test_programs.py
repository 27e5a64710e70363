"""Programs compute what transformers computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shardwright.models import build
from shardwright.models.layers.decoder import program_of
from tests.matrix import some
from tests.models.evaluated import computed
from tests.models.published import CASES, LENGTH, ROWS, TOLERANCE, one_document, published_logits
from tests.models.random_weights import random_weights

COVERING = ("llama3 grouped queries", "mixtral", "deepseek3", "deepseek2 groups")


@pytest.mark.parametrize("case", some([*CASES], map([*CASES].index, COVERING)))
def test_logits(case: str, tmp_path: Path) -> None:
    model, overrides = CASES[case]
    table = build(model, {"num_layers": "3", **overrides})
    weights = random_weights(table)
    tokens = np.random.default_rng(1).integers(0, table.sizes["vocab"], (ROWS, LENGTH))
    theirs = published_logits(table, weights, tokens, tmp_path)
    fields = {"tokens": tokens, "targets": tokens, "valid": tokens >= 0, **one_document(tokens.shape)}
    _, scores = computed(program_of(table.architecture), weights, {f"input.{name}": of for name, of in fields.items()})
    np.testing.assert_allclose(scores, theirs, rtol=0, atol=TOLERANCE)
