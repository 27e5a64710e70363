"""Predictions for drawn steps on PyTorch are those of the current plans, the page is that of the stored results, and dry runs are near."""

from __future__ import annotations

import json

from tests.targets.policies import name_of
from tests.targets.torch_policies import NUMBER, PAGE, PREDICTED, RUN, drawn, planned_memory, text_of_page


def test_the_drawn_steps_have_the_stored_predictions() -> None:
    found = {name_of(step): planned_memory(step) for step in drawn()}
    assert len(found) == NUMBER
    assert found == json.loads(PREDICTED.read_text(encoding="utf-8")), (
        "python -m tests.targets.torch_policies predict, then page"
    )


def test_the_page_is_that_of_the_stored_results() -> None:
    assert set(json.loads(RUN.read_text(encoding="utf-8"))) <= {name_of(step) for step in drawn()}
    assert PAGE.read_text(encoding="utf-8") == text_of_page(), "python -m tests.targets.torch_policies page"
