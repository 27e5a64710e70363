"""Each fault of a MaxText file: the full text of its finding, a neighbour without it, and fixes that work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.core.findings.codes import CODES, SEVERITIES
from shardwright.core.findings.finding import Finding
from shardwright.interop.maxtext.checks import CHECKS
from tests.interop.maxtext_case import FOLDER, Case, findings, imported_in, meant
from tests.interop.maxtext_cases import CASES
from tests.interop.typed_fix import typed

HOW = "If the text changed on purpose: python -m tests.interop.regenerate, and read the diff."


def ids(case: Case) -> str:
    return case.name


Found = Callable[[Case], tuple[Finding, ...]]


@pytest.fixture(scope="module")
def found_in(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The findings of a case as it is, which is imported once."""
    known: dict[str, tuple[Finding, ...]] = {}

    def found_in(case: Case) -> tuple[Finding, ...]:
        if case.name not in known:
            known[case.name] = findings(case, tmp_path_factory.mktemp("case"))
        return known[case.name]

    return found_in


def key(finding: Finding) -> tuple[str, str | None, str]:
    return finding.code, finding.tensor, finding.where


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_full_text_is_the_golden_one(case: Case, found_in: Found) -> None:
    found = meant(case, found_in(case))
    assert found
    text = "\n\n".join(finding.text() for finding in found) + "\n"
    assert text == case.path.read_text(encoding="utf-8"), HOW


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_neighbour_has_no_such_finding(case: Case, tmp_path: Path, found_in: Found) -> None:
    wrong = {key(finding) for finding in meant(case, found_in(case))}
    neighbour = {key(finding) for finding in findings(case.neighbour(), tmp_path)}
    assert not wrong & neighbour


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_no_finding_is_worse_than_its_code_allows_and_each_has_a_place(case: Case, found_in: Found) -> None:
    for finding in found_in(case):
        assert SEVERITIES.index(finding.severity) >= SEVERITIES.index(CODES[finding.code].severity)
        if finding.code != "SW123":
            assert finding.position is not None, finding.text()
            assert finding.position.source in case.files or finding.position.source == "--given"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_position_is_that_of_the_fault(case: Case, found_in: Found) -> None:
    for finding in meant(case, found_in(case)):
        if finding.position is None or finding.position.source not in case.files:
            continue
        line = case.files[finding.position.source].splitlines()[finding.position.line - 1]
        assert line.strip()
        assert finding.position.column <= len(line)


def test_the_folder_has_no_file_without_a_case() -> None:
    assert set(FOLDER.glob("*")) == {case.path for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_fix_that_is_typed_removes_the_finding_and_adds_no_error(case: Case, tmp_path: Path, found_in: Found) -> None:
    before = found_in(case)
    errors = {key(finding) for finding in before if finding.severity == "error"}
    for finding in meant(case, before):
        if not finding.fix or finding.fix == "Add the rules to a copy of the preset's file.":
            continue
        assert finding.position is not None
        source = finding.position.source
        if source == "--given":
            given = list(case.options["given"])
            text = typed(given[finding.position.line - 1] + "\n", finding.fix, 1).strip()
            given[finding.position.line - 1] = text
            given = [each for each in given if each]
            after = findings(replace(case, options={**case.options, "given": tuple(given)}), tmp_path)
        else:
            text = typed(case.files[source], finding.fix, finding.position.line)
            after = findings(replace(case, files={**case.files, source: text}), tmp_path)
        assert key(finding) not in {key(each) for each in after}, text
        assert {key(each) for each in after if each.severity == "error"} <= errors, text


@pytest.fixture(scope="module")
def found_by_check(tmp_path_factory: pytest.TempPathFactory, found_in: Found) -> list[tuple[set, dict[str, set]]]:
    """For each case the findings under test, and the findings of each check."""
    found = []
    for case in CASES:
        about = {key(finding) for finding in meant(case, found_in(case))}
        imported = imported_in(case, tmp_path_factory.mktemp("case"))
        if imported is not None:
            found.append((about, {c.__name__: {key(d.finding) for d in c(imported)} for c in CHECKS}))
    return found


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_can_be_left_out(check, found_by_check) -> None:
    """Some case tests a finding of this check and of no other."""
    assert any(
        about
        & by_check[check.__name__] - {each for name in by_check if name != check.__name__ for each in by_check[name]}
        for about, by_check in found_by_check
    )
