"""The stored predictions are those of the current plans."""

from __future__ import annotations

import pytest

from shardwright.core.findings.codes import DEQUANTIZED
from tests.targets.cases import CASES, LARGE, Case
from tests.targets.predicted import kept, plan_of, predicted

ALL = {case.name: case for case in (*CASES, *LARGE)}


def test_each_case_has_a_unique_name_and_a_prediction() -> None:
    assert len(ALL) == len(CASES) + len(LARGE) >= 24
    assert list(kept()) == list(ALL)


@pytest.mark.parametrize("case", ALL.values(), ids=ALL)
def test_the_prediction_is_the_plan(case: Case) -> None:
    plan = plan_of(case)
    # A program is compiled also where the chip multiplies values in place of codes.
    assert {finding.code for finding in plan.errors} <= {DEQUANTIZED}
    assert predicted(plan) == kept()[case.name], "python -m tests.targets.predicted, and read the diff"
