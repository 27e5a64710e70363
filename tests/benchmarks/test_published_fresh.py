"""Published steps that were listed before they were priced: the page has all of them, and rows of some are made anew."""

from __future__ import annotations

import re

import pytest

from benchmarks.published.__main__ import row_of
from benchmarks.published.fresh.__main__ import HERE, PAGE, has_experts
from benchmarks.published.later.__main__ import HERE as LATER
from benchmarks.published.later.__main__ import WIDER, line
from benchmarks.published.steps import published, steps_of

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.])")
STEPS = {step.name: step for step in steps_of(HERE)}
MADE_ANEW = (
    "fresh-mpt-7b-h100-512",
    "fresh-22b-v4-1x64",
    "fresh-mixtral-8x7b-b200-64-fp8-2502",
    "fresh-nemotron-15b-gb200-64-fp8-2504",
)


def lines_on_page() -> dict[str, str]:
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    return {name: row for row in rows for name in [row.split(" | ")[0].removeprefix("| ")] if name in STEPS}


def test_every_step_has_a_row_a_command_and_a_source_and_is_in_no_earlier_list() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(lines_on_page()) == set(STEPS)
    for step in STEPS.values():
        assert f"{step.name}: {step.at}\n  shardwright plan {step.plan}\n" in page
        assert (step.seconds is None) != (step.tokens_per_s is None)
    earlier = {step.plan for step in (*published(), *steps_of(LATER), *steps_of(WIDER))}
    assert not earlier & {step.plan for step in STEPS.values()}


def test_they_are_enough_with_experts_among_them_and_the_page_says_when_both_were_made() -> None:
    assert len(STEPS) >= 40
    assert sum(has_experts(step) for step in STEPS.values()) >= len(STEPS) / 5
    day = r"commit [0-9a-f]{7,} of \d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.search(f"^The list: {day}. The prices: {day} ", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def test_the_summary_is_that_of_the_rows() -> None:
    rows = list(lines_on_page().values())
    held = sum(": outside" not in row for row in rows)
    summary = next(row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith("| all |"))
    assert summary.startswith(f"| all | {len(rows)} | ")
    assert summary.endswith(f"| {held} of {len(rows)} |")


@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_row_is_what_the_command_writes(name: str) -> None:
    """Within the last digits: `python -m benchmarks.published.fresh` writes it anew."""
    written, now = lines_on_page()[name], line(row_of(STEPS[name]))
    assert NUMBER.sub("N", written) == NUMBER.sub("N", now)
    for first, second in zip(NUMBER.findall(written), NUMBER.findall(now), strict=True):
        assert abs(float(first) - float(second)) <= max(2, 0.02 * abs(float(second)))
