"""Which tests run for a fault, which faults are drawn, and the report of the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import Verdict, drawn_from, ranked_tests, report, stale
from tests.mutants.faults import Fault
from tests.mutants.lines import Traced


def fault(number: int) -> Fault:
    return Fault(
        file="core/of.py", function="f", kind="compare", lines=(3, 4), old="a < b", new=f"a <= {number}", text=""
    )


def test_the_quickest_tests_of_each_file_that_run_the_statement_come_first() -> None:
    def test(name: str, seconds: float, *lines: int) -> Traced:
        return Traced(name=name, seconds=seconds, lines={"core/of.py": frozenset(lines)})

    tests = [
        test("a::slow", 9, 3),
        test("a::elsewhere", 0.1, 2, 5),
        *(test(f"a::{number}", 0.1 + number / 10, 4) for number in range(5)),
        test("b::one", 2, 3, 4),
    ]
    chosen = ranked_tests(fault(0), tests, seconds=100)
    assert [one.name for one in chosen] == ["a::0", "a::1", "a::2", "a::3", "b::one", "a::4", "a::slow"]
    assert [one.name for one in ranked_tests(fault(0), tests, seconds=1)] == ["a::0", "a::1", "a::2", "a::3"]
    # One test runs, however long it takes.
    assert [one.name for one in ranked_tests(fault(0), tests[:1], seconds=1)] == ["a::slow"]


def test_a_seed_draws_the_same_faults_each_once_and_from_every_folder() -> None:
    folders = [Path("src/shardwright/data"), Path("src/shardwright/core/model/capacity.py")]
    once, again, other = (drawn_from(folders, 40, seed) for seed in (0, 0, 1))
    assert [one.key for one in once] == [one.key for one in again] != [one.key for one in other]
    assert len({one.key for one in once}) == 40
    assert sum(one.file == "core/model/capacity.py" for one in once) == 20


def test_a_survivor_without_a_reason_ends_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [Verdict(fault=fault(n), detected=n == 0, by="4 tests run it") for n in range(3)]
    assert report(verdicts, {fault(1).key: "The same.", fault(2).key: ""}) == 1
    out = capsys.readouterr().out
    assert "| core | 3 | 1 | 1 | 1 |" in out
    assert out.count("src/shardwright/core/of.py:3 f (compare); 4 tests run it\n  - a < b\n  + a <= 2\n") == 1
    assert "a <= 1" not in out
    assert report(verdicts, {fault(1).key: "The same.", fault(2).key: "The same."}) == 0


def test_stale_survivors_are_found() -> None:
    there = (
        "core/model/capacity.py",
        "Traffic.buffer_rows",
        "return ceil(min(self.most, factor * self.assignments))",
        "",
    )
    gone = [("core/model/capacity.py", "f", "return no_such_name", ""), ("core/no_such_file.py", "f", "return", "")]
    assert stale([there, *gone]) == gone
