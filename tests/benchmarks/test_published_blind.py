"""Lists of published steps that were written down before they were priced: a page has all of its list, and rows of some are made anew."""

from __future__ import annotations

import re

import pytest

from benchmarks.published.blind import LISTS, folder_of, has_experts, main, page_of
from benchmarks.published.later.__main__ import HERE as LATER
from benchmarks.published.later.__main__ import WIDER
from benchmarks.published.steps import published, steps_of
from tests.benchmarks.rows_on_page import check_anew, check_steps, rows_on_page

STEPS = {name: {step.name: step for step in steps_of(folder_of(name))} for name in LISTS}
PRICED = [name for name in LISTS if page_of(name).exists()]
MADE_ANEW = {
    "fresh": (
        "fresh-mpt-7b-h100-512",
        "fresh-22b-v4-1x64",
        "fresh-mixtral-8x7b-b200-64-fp8-2502",
        "fresh-nemotron-15b-gb200-64-fp8-2504",
    ),
    "second": (
        "second-llama2-7b-a100-8-fsdp",
        "second-8b-gb300-8-nvfp4",
        "second-oss20b-gb300-8-mxfp8",
        "second-32b-h100-8-compile",
    ),
}
"""Without stages, whose plans take longer."""


@pytest.mark.parametrize("name", LISTS)
def test_a_list_is_long_with_experts_in_it_and_shares_no_step_with_another(name: str) -> None:
    steps = STEPS[name].values()
    assert len(steps) >= 40
    assert sum(has_experts(step) for step in steps) >= max(15, len(steps) / 5)
    folders = [LATER, WIDER, *(folder_of(other) for other in LISTS if other != name)]
    others = {step.plan for step in (*published(), *(step for folder in folders for step in steps_of(folder)))}
    assert not others & {step.plan for step in steps}


@pytest.mark.parametrize("name", PRICED)
def test_every_step_has_a_row_a_command_and_a_source(name: str) -> None:
    check_steps(page_of(name), STEPS[name].values())


@pytest.mark.parametrize("name", PRICED)
def test_a_page_says_when_its_list_and_the_prices_were_made(name: str) -> None:
    day = r"commit [0-9a-f]{7,} of \d{4}-\d\d-\d\d \d\d:\d\d"
    assert re.search(f"^The list: {day}. The prices: {day} ", page_of(name).read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize("name", PRICED)
def test_the_summary_is_that_of_the_rows(name: str) -> None:
    rows = rows_on_page(page_of(name), STEPS[name]).values()
    held = sum(": outside" not in row for row in rows)
    summary = next(row for row in page_of(name).read_text(encoding="utf-8").splitlines() if row.startswith("| all |"))
    assert summary.startswith(f"| all | {len(rows)} | ")
    assert summary.endswith(f"| {held} of {len(rows)} |")


@pytest.mark.parametrize(("name", "step"), [(name, step) for name in PRICED for step in MADE_ANEW[name]])
def test_a_row_is_what_the_command_writes(name: str, step: str) -> None:
    """`python -m benchmarks.published.blind LIST` writes it anew."""
    check_anew(rows_on_page(page_of(name), [step])[step], STEPS[name][step])


def test_rows_of_some_steps_are_printed_with_their_errors_and_no_page_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, step = page_of("fresh").read_text(encoding="utf-8"), STEPS["fresh"]["fresh-mpt-7b-h100-512"]
    monkeypatch.setattr("sys.argv", ["blind", "fresh", "--only", step.name])
    assert main() == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].startswith(f"| {step.name} | ")
    assert [row.split(" | ")[0] for row in rows[3:]] == ["| all", "| dense", f"| {step.source}"]
    assert page_of("fresh").read_text(encoding="utf-8") == before


def test_a_list_or_a_step_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        (["third"], "choose from"),
        (["fresh", "--only", "no-such"], "no step of fresh has 'no-such'"),
    ):
        monkeypatch.setattr("sys.argv", ["blind", *arguments])
        with pytest.raises(SystemExit):
            main()
        assert message in capsys.readouterr().err
