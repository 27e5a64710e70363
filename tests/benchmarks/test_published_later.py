"""Published steps that were found later: the page has all of them, and rows of some are made anew."""

from __future__ import annotations

import pytest

from benchmarks.published.later.__main__ import EXPERTS, HERE, PAGE, WIDER
from benchmarks.published.steps import published, steps_of
from tests.benchmarks.rows_on_page import check_anew, check_steps, rows_on_page

STEPS = {step.name: step for step in steps_of(HERE)}
MADE_ANEW = (
    "mpt-13b-h100-8-4096",
    "mpt-70b-a100-64-2048",
    "nemo-8b-gb300-8-fp8-2511",
    "ao-8b-b200-8",
    "nemo-30b-b200-8-mxfp8-260201",
    "simumax-deepseekv3-l4-ep8-pp1-mbc4",
)
"""Of each source without stages, whose plans take longer."""


def test_every_step_has_a_row_a_command_and_a_source_and_is_in_no_fit() -> None:
    check_steps(PAGE, STEPS.values())
    assert not set(STEPS) & {step.name for step in published()}


@pytest.mark.parametrize("name", MADE_ANEW)
def test_a_row_is_what_the_command_writes(name: str) -> None:
    """`python -m benchmarks.published.later` writes it anew."""
    check_anew(rows_on_page(PAGE, [name])[name], STEPS[name])


def test_the_summary_is_that_of_the_rows() -> None:
    """Nine of ten are in the range that a plan prints, here too."""
    rows = list(rows_on_page(PAGE, STEPS).values())
    outside = sum(": outside" in row for row in rows)
    assert f"| {len(rows) - outside} of {len(rows)} |" in PAGE.read_text(encoding="utf-8")
    assert outside <= len(rows) / 10


def test_what_the_tables_leave_out_has_a_table_too() -> None:
    """All mixtures of experts are summed up with it, so that a selection does not hide an error."""
    page, wider = PAGE.read_text(encoding="utf-8"), steps_of(WIDER)
    for step in wider:
        assert f"| {step.name} | " in page
        assert f"{step.name}: {step.at}\n  shardwright plan {step.plan}\n" in page
    assert not {step.name for step in wider} & set(STEPS)
    experts = sum(step.source == EXPERTS for step in STEPS.values()) + len(wider)
    assert f"| all experts, with those left out | {experts} |" in page


def test_dropless_experts_are_near_without_a_size_of_their_buffers() -> None:
    """Of all later mixtures of experts: within 15% on average, and nine of ten in the range."""
    rows = {
        name: row
        for name, row in rows_on_page(PAGE, STEPS).items()
        if STEPS[name].model.startswith(("mixtral", "deepseek3"))
    }
    assert len(rows) >= 20
    assert not any("--expert-buffer" in STEPS[name].plan or "capacity_factor" in STEPS[name].plan for name in rows)
    errors = [abs(float(row.split(" | ")[3].rstrip("%"))) for row in rows.values()]
    assert sum(errors) / len(errors) < 15
    assert sum(": outside" in row for row in rows.values()) <= len(rows) / 10
