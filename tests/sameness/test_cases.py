"""The cases cover what they should, before any of them is trained."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.core.layout.layout import ATTENTION_MOVES, MOE_MOVES
from shardwright.layouts import preset_names
from tests.engine_jax.made_rows import LENGTH, tokens_of
from tests.engine_jax.steps import layout_of, plan_of
from tests.sameness.cases import COVERING, DEEPSEEK3, MODELS, PAIRS, UNTRAINED, WHOLE, covering
from tests.sameness.page import PAGE, cells

TRAINED = set(preset_names()) - UNTRAINED.keys()

ELSEWHERE = {"auto", "two-hops"}
"""`auto` is one of the others. Two hops need two axes of experts, which no preset has: both engines compare them with one device in their
``test_two_hops.py``."""


@pytest.mark.parametrize("model", MODELS)
def test_every_family_has_every_preset_on_two_meshes(model: str) -> None:
    for preset in TRAINED:
        meshes = {case.mesh for case in WHOLE if (case.model, case.layout) == (model, preset)}
        assert len(meshes) >= 2, preset


def test_the_covering_cases_cover_everything() -> None:
    assert set(COVERING) <= set(WHOLE)
    assert {case.layout for case in COVERING} == TRAINED
    assert all(len(covering(model)) >= 5 for model in MODELS)
    for cases in (COVERING, WHOLE):
        layouts = [layout_of(case) for case in cases]
        assert {layout.move_attention for layout in layouts} == set(ATTENTION_MOVES)
        assert {layout.move_moe for layout in layouts} == set(MOE_MOVES) - ELSEWHERE
        assert any(case.rows < plan_of(case).mesh.num_devices for case in cases)
        assert any(case.balanced for case in cases)
        assert any("num_kv_heads" in case.settings for case in cases)
        assert any("capacity_factor" in case.settings for case in cases)
    assert {model for pair in PAIRS for model in (pair[0].model, pair[1].model)} == {MODELS[0], DEEPSEEK3}


def test_rows_are_few_and_unequal() -> None:
    """For any number of devices that shard the rows, one has no valid token in the first two steps, whose gradients are
    compared."""
    for rows, readers in {(case.rows, plan_of(case).mesh.size(plan_of(case).dp)) for case in WHOLE}:
        assert rows * LENGTH <= 512
        valid = [tokens_of(step, rows)["valid"] for step in range(2)]
        assert len(np.unique(valid[0].sum(axis=1))) >= 4
        if readers > 1:
            assert any(0 in each.reshape(readers, -1).sum(axis=1) for each in valid), (rows, readers)


def test_every_case_has_microbatches_and_a_plan() -> None:
    assert {case.microbatches for case in WHOLE} == {2}
    assert all(plan_of(case).errors == () for case in WHOLE)


@pytest.mark.parametrize("model", MODELS)
def test_the_page_has_every_case(model: str) -> None:
    table = PAGE.read_text(encoding="utf-8").split(f"## {model}\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    cases = [case for case in WHOLE if case.model == model]
    assert [row.startswith(cells(case)) for row, case in zip(rows, cases, strict=True)] == [True] * len(cases)
