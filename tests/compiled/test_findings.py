"""Each law about compiled programs, violated: the full text of the finding, a neighbour that complies, and its page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardwright.compiled.agreement.agreement import agree
from shardwright.compiled.findings import CHECKS, compiled_findings
from shardwright.compiled.reading.program import CompiledCollective
from shardwright.core.findings.codes import CODES, SEVERITIES
from shardwright.core.planning import resolve
from tests.compiled.programs import as_planned, changed
from tests.golden.compiled_case import (
    FOLDER,
    CompiledCase,
    findings_in,
    first_text,
    golden_text,
    of_its_code,
    plan_of,
)
from tests.golden.compiled_cases import COMPILED_CASES, ON_PAGES
from tests.golden.compiled_programs import planned
from tests.golden.findings_case import Case, request
from tests.golden.findings_pages import page_of
from tests.golden.typed_fix import typed

HOW = "If the text was meant to change: python -m tests.golden.regenerate_findings, and read the diff."


def ids(case: CompiledCase) -> str:
    return case.name


@pytest.mark.parametrize("case", COMPILED_CASES, ids=ids)
def test_the_full_text_is_the_golden_one(case):
    assert golden_text(case) == case.path.read_text(encoding="utf-8"), HOW


@pytest.mark.parametrize("case", COMPILED_CASES, ids=ids)
def test_its_neighbour_has_no_finding_of_its_code(case):
    assert of_its_code(case, case.program)
    assert not of_its_code(case, case.neighbour)


@pytest.mark.parametrize("case", COMPILED_CASES, ids=ids)
def test_a_program_equal_to_its_plan_has_no_findings(case):
    assert findings_in(case, planned) == ()


@pytest.mark.parametrize("case", COMPILED_CASES, ids=ids)
def test_no_finding_is_worse_than_its_code_allows(case):
    for finding in findings_in(case, case.program):
        assert SEVERITIES.index(finding.severity) >= SEVERITIES.index(CODES[finding.code].severity)


@pytest.mark.parametrize("case", COMPILED_CASES, ids=ids)
def test_a_fix_that_is_typed_can_be_planned(case):
    for finding in findings_in(case, case.program):
        if not finding.fix or finding.fix.startswith("pip "):
            continue
        options = {**case.options, "devices": 8}
        before = Case(name="", model=case.model, layout=case.layout, options=options, neighbour={})
        after = resolve(request(typed(before, finding.fix)))
        assert after.request != plan_of(case).request


def test_every_code_has_a_case_and_the_folder_no_file_without_one():
    codes = {code for code in CODES if code.startswith("SW3")}
    assert {case.code for case in COMPILED_CASES} == codes
    assert set(FOLDER.glob("*")) == {case.path for case in COMPILED_CASES}
    assert len({case.name for case in COMPILED_CASES}) == len(COMPILED_CASES)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_no_check_can_be_left_out(check):
    for case in COMPILED_CASES:
        plan, program = plan_of(case), case.program(plan_of(case))
        found = compiled_findings(plan, program, agree(plan, program), checks=(check,))
        if any(finding.code == case.code for finding in found):
            return
    raise AssertionError(f"no case needs {check.__name__}")


@pytest.mark.parametrize("code", ON_PAGES)
def test_page_shows_the_case_with_its_layout_and_its_command(code):
    page, case = page_of(code), ON_PAGES[code]
    assert page.block("Wrong", "text") == first_text(case)
    assert page.block("Wrong", "yaml") == f"# mine.yaml\n{case.layout}"
    command = page.block("Wrong", "sh")
    assert command.startswith(f"shardwright compile {case.model} --layout mine.yaml --chips {case.chips} ")
    options = {flag.replace("-", "_"): value for flag, value in re.findall(r"--([a-z-]+) (\S+)", command)}
    assert {name: str(value) for name, value in case.options.items()}.items() <= options.items()


def test_a_gather_that_something_reads_whole_is_not_made_whole_for_nothing():
    case = next(case for case in COMPILED_CASES if case.name == "SW304-gathered-and-sliced")
    plan = plan_of(case)
    read = changed(case.program(plan), lambda one: replace(one, users=("dynamic-slice", "dot") if one.users else ()))
    codes = {finding.code for finding in compiled_findings(plan, read, agree(plan, read))}
    assert codes == {"SW302"}


def test_a_gather_that_takes_no_visible_part_of_the_step_is_no_error():
    """It was an error of microseconds, and ended `compile` with 1."""
    case = next(case for case in COMPILED_CASES if case.name == "SW304-gathered-and-sliced")
    plan = plan_of(case)
    for bytes_per_device, severity in ((1 << 10, "info"), (1 << 29, "error")):

        def sized(one: CompiledCollective, size: int = bytes_per_device) -> CompiledCollective:
            return replace(one, bytes_per_device=size) if one.users == ("dynamic-slice",) else one

        program = changed(case.program(plan), sized)
        found = [one for one in compiled_findings(plan, program, agree(plan, program)) if one.code == "SW304"]
        assert [one.severity for one in found] == [severity]


def test_chips_without_a_limit_have_no_finding_about_memory():
    from tests.cost.plans import plan_of as planned_of

    plan = planned_of("llama3-test", "fsdp", devices=8, batch=8)
    program = as_planned(plan)
    assert compiled_findings(plan, program, agree(plan, program)) == ()
