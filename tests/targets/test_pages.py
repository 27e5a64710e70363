"""The stored results of compiled cases show what the cases are for, and the pages are those of the stored results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.resolution.resolve import traffic_of
from tests.targets.cases import CASES, LARGE, Case
from tests.targets.moe_page import moe_page
from tests.targets.movements import Movement, kept_movements, tokens_or_weights
from tests.targets.page import LIMITS, by_rewrites, page
from tests.targets.peer import PEER, TWO_A_CHIP, missed_aims, peer_page
from tests.targets.predicted import kept, plan_of
from tests.targets.row import Row, kept_rows

DOCS = Path(__file__).parent.parent.parent / "docs"
ALL = {case.name: case for case in (*CASES, *LARGE)}
EXPERTS = {"layers.moe.gate", "layers.moe.up", "layers.moe.down"}
MOVES = {case.name: case for case in tokens_or_weights()}

ROW = Row(
    case="mixtral-8x7b ep expert8 v5p:2x2x2",
    predicted_bytes=90,
    compiled_bytes=100,
    compared_bytes=100,
    matched=3,
    explained=(),
    explained_share=0.0,
    unmatched=(),
    bytes_error=0.0,
    predicted_memory=1000,
    peak=1000,
    memory_error=0.0,
    arguments=600,
    temporaries=500,
    seconds=10.0,
    versions=("jax 1",),
)


def exchanged(lines: Sequence[Movement]) -> list[Movement]:
    """The program's collectives in the experts' component over their axis."""
    return [line for line in lines if line.component == "moe" and "expert" in line.axes and line.compiled_bytes]


def kinds(line: Movement) -> tuple[str, ...]:
    return line.compiled_as or (line.kind,)


def test_tokens_and_weights_are_compiled_for_three_targets() -> None:
    assert sorted((case.chips, case.move) for case in MOVES.values()) == [
        (chips, move) for chips in ("cpu:8", "h100:1x8", "v5p:2x2x2") for move in ("moe=all-to-all", "moe=weights")
    ]
    assert set(MOVES) <= set(kept_movements())


@pytest.mark.parametrize("case", MOVES.values(), ids=MOVES)
def test_tokens_are_sent_or_weights_gathered(case: Case) -> None:
    lines = exchanged(kept_movements()[case.name].lines)
    gathered = {name for line in lines if "all-gather" in kinds(line) for name in line.weights}
    if case.move == "moe=all-to-all":
        assert [line for line in lines if kinds(line) == ("all-to-all",)]
        assert not gathered
    else:
        assert not [line for line in lines if kinds(line) == ("all-to-all",)]
        assert gathered == EXPERTS


@pytest.mark.parametrize("name", kept_movements())
def test_the_lines_of_a_case_add_up_to_its_row(name: str) -> None:
    row, lines = kept_rows()[name], kept_movements()[name].lines
    assert sum(line.predicted_bytes for line in lines) == row.predicted_bytes
    # Merged bytes are divided between lines, with an error of at most a byte each.
    assert sum(line.compiled_bytes for line in lines) == pytest.approx(row.compiled_bytes, abs=len(lines))
    states = [line.state for line in lines]
    assert (states.count("matched"), states.count("unmatched")) == (row.matched, len(row.unmatched))


@pytest.mark.parametrize("row", kept_rows().values(), ids=kept_rows())
def test_a_row_has_the_current_prediction(row: Row) -> None:
    prediction = kept()[row.case]
    assert row.predicted_memory == prediction["memory total_bytes_per_device"]
    moved = {name: size for name, size in prediction.items() if not name.startswith("memory ")}
    assert row.predicted_bytes == sum(moved.values())


def test_the_pages_are_those_of_the_stored_results() -> None:
    rows, movements = kept_rows(), kept_movements()
    found = {
        "compiled.md": page([ALL[name] for name in ALL if name in rows], rows),
        "compiled-moe.md": moe_page(tokens_or_weights(), movements),
        "beside-maxtext.md": peer_page(rows, movements),
    }
    for name, text in found.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "python -m tests.targets.table --pages"


def test_a_large_case_weighs_more_than_a_small_one() -> None:
    rows = [replace(ROW, compared_bytes=900, explained_share=0.1), replace(ROW, explained_share=0.5)]
    assert by_rewrites(rows) == pytest.approx(0.14)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, ""),
        ({"unmatched": ("moe all-gather expert 0.000 0.001",)}, "unmatched: moe all-gather expert 0.000 0.001"),
        ({"explained_share": 0.101}, "10.1% by rewrites"),
        ({"bytes_error": 0.02}, "bytes 2.0% off"),
        ({"memory_error": -0.11}, "memory -11.0%"),
    ],
)
def test_a_case_that_misses_is_named(change: dict, missed: str) -> None:
    row = replace(ROW, **change)
    text = page([replace(CASES[0])], {CASES[0].name: row})
    assert (f"- {row.case}: {missed}" in text) is bool(missed)
    assert ("Those that miss" in text) is bool(missed)
    assert len([limit for limit in LIMITS if limit.value(row) > limit.limit]) == bool(missed)


def test_every_step_compared_with_the_peer_is_a_stored_case() -> None:
    rows = kept_rows()
    assert {one.case for one in PEER} - {None} <= set(rows)
    text = peer_page(rows, kept_movements())
    assert "not compiled yet" not in text


@pytest.mark.parametrize(
    ("moved", "temporaries", "seconds", "missed"),
    [
        (690e9, 55e9, 150.4, ()),
        (691e9, 55e9, 150, ("moved",)),
        (690e9, 56e9, 151, ("temporaries", "seconds")),
    ],
)
def test_aims_that_are_missed(moved: float, temporaries: float, seconds: float, missed: tuple[str, ...]) -> None:
    (one,) = (one for one in PEER if one.aim.get("moved") == 690)
    row = replace(ROW, compiled_bytes=int(moved), temporaries=int(temporaries), seconds=seconds)
    assert missed_aims(one, row) == missed


def test_the_page_gives_the_size_of_a_dropless_buffer() -> None:
    (case,) = (case for case in LARGE if case.mesh == TWO_A_CHIP and case.expert_buffer == 2)
    plan = plan_of(replace(case, expert_buffer=None))
    assert [finding.code for finding in plan.errors] == ["SW312"]
    traffic = traffic_of(plan.request, plan.mesh)
    assert traffic.most == 32 * traffic.assignments
    assert "32 times" in (DOCS / "beside-maxtext.md").read_text(encoding="utf-8")
