"""Published layouts with stages are legal here and fit their chips; docs/stages.md says what they take."""

from __future__ import annotations

import pytest

from tests.cost.published_stages import BEGIN, CASES, END, PAGE, Published, row_of
from tests.matrix import some


@pytest.mark.parametrize("case", some(CASES, (0, 2)), ids=lambda case: f"{case.model} {case.chips} {case.degrees}")
def test_the_table_says_what_a_published_layout_takes(case: Published):
    rows = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines(keepends=True)
    assert len(rows) == 2 + len(CASES)
    assert rows[2 + CASES.index(case)] == row_of(case)
