"""Predictions for drawn policies are those of the current plans, and the page is that of the stored results."""

from __future__ import annotations

import json

from tests.targets.policies import (
    COMPILED,
    NUMBER,
    PAGE,
    PREDICTED,
    drawn,
    draws,
    name_of,
    peak_of_refused,
    planned_memory,
    text_of_page,
)


def test_the_drawn_cases_have_the_stored_predictions() -> None:
    found = {name_of(case): planned_memory(case) for case in drawn()}
    assert {len(of_seed) for of_seed in draws().values()} == {NUMBER}
    assert found == json.loads(PREDICTED.read_text(encoding="utf-8")), (
        "python -m tests.targets.policies predict, then page"
    )


def test_the_page_is_that_of_the_stored_results() -> None:
    assert set(json.loads(COMPILED.read_text(encoding="utf-8"))) <= {name_of(case) for case in drawn()}
    assert PAGE.read_text(encoding="utf-8") == text_of_page(), "python -m tests.targets.policies page"


def test_what_a_refused_program_needs_is_read_from_its_finding() -> None:
    plan = {"found": "31.9 GiB, 102% of what a TPU v6e lets a program use"}
    program = {"found": "36.2 GiB at its peak, 116% of what a TPU v6e lets a program use; the plan expects 31.9 GiB"}
    assert peak_of_refused([plan, program]) == round(36.2 * 2**30)
