"""Each law, broken: the entire text of the finding; a neighbour that keeps the law; and every printed fix, applied literally."""

from __future__ import annotations

from functools import cache

import pytest

from shardwright import FindingsError, Plan
from shardwright.core.checks import CHECKS
from shardwright.core.findings.codes import CODES, SEVERITIES
from shardwright.core.findings.finding import Finding
from shardwright.core.planning import resolve
from tests.conftest import ROOT
from tests.golden.findings_case import FOLDER, Case, findings, golden_text, of_its_code, request
from tests.golden.findings_cases import CASES, ELSEWHERE
from tests.golden.typed_fix import typed

HOW = "If the change of the text is intended: python -m tests.golden.regenerate_findings, and read the diff."
READING_FIX = ("Write ", "Take ", "Remove ", "Add ", "Did you mean ")


@cache
def plan_of(name: str) -> Plan | None:
    """The plan of a case before its findings; None: its layout cannot be resolved."""
    try:
        return resolve(request(next(case for case in CASES if case.name == name)))
    except FindingsError:
        return None


def key(finding: Finding) -> tuple[str, str | None, str]:
    return finding.code, finding.tensor, finding.where


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_entire_text_is_the_golden_one(case):
    assert golden_text(case) == case.path.read_text(encoding="utf-8"), HOW


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_case_has_a_finding_of_its_code_and_its_neighbour_has_not(case):
    found = {key(finding) for finding in of_its_code(case)}
    assert found
    assert not found & {key(finding) for finding in of_its_code(case.similar())}


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_no_finding_is_worse_than_its_code_allows(case):
    for finding in findings(case):
        assert SEVERITIES.index(finding.severity) >= SEVERITIES.index(CODES[finding.code].severity)


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_a_fix_that_is_typed_removes_the_finding_and_breaks_nothing_else(case):
    before = findings(case)
    errors = {key(finding) for finding in before if finding.severity == "error"}
    for finding in before:
        if not finding.fix or finding.fix.startswith(READING_FIX):
            continue
        # The change that helps most need not be enough.
        if finding.code == "SW206":
            continue
        after = findings(typed(case, finding.fix))
        assert key(finding) not in {key(f) for f in after if f.severity != "info" or finding.severity == "info"}
        assert {key(f) for f in after if f.severity == "error"} <= errors


def test_every_code_has_a_case_and_the_folder_no_file_without_one():
    assert {case.code for case in CASES} == set(CODES) - set(ELSEWHERE)
    assert set(FOLDER.glob("*")) == {case.path for case in CASES}
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("code", ELSEWHERE)
def test_the_text_of_a_code_that_no_request_has_is_tested_elsewhere(code):
    assert f"{CODES[code].severity} {code}: {CODES[code].law}" in (ROOT / ELSEWHERE[code]).read_text(encoding="utf-8")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_can_be_left_out(check):
    for case in CASES:
        plan = plan_of(case.name)
        if plan is not None and any(draft.finding.code == case.code for draft in check(plan)):
            return
    raise AssertionError(f"no case needs {check.__name__}")


def test_places_in_files_have_line_and_column():
    for case in CASES:
        for finding in of_its_code(case):
            if finding.position is not None:
                assert finding.place.startswith(f"{finding.position.source}:{finding.position.line}:")
                assert finding.position.column >= 1


def test_carets_mark_entire_words_of_the_notation():
    for case in CASES:
        for finding in findings(case):
            if finding.notation is not None and finding.mark is not None:
                start, stop = finding.mark
                marked = finding.notation[start:stop]
                assert marked
                assert all(word in finding.notation.split() for word in marked.split())
