"""Every code has a page, and the page shows the output of the command."""

from __future__ import annotations

import pytest

from shardwright.core.findings.codes import CODES, NOT_RUN
from shardwright.core.findings.thresholds import THRESHOLDS
from tests.golden.compiled_cases import ON_PAGES
from tests.golden.findings_pages import FOLDER, SECTIONS, findings_of, of_the_page, page_of, shown


def test_there_is_a_page_for_each_code_and_no_other():
    assert {path.stem for path in FOLDER.glob("SW*.md")} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_page_has_the_title_the_law_and_the_four_sections(code):
    page = page_of(code)
    assert page.head == f"# {code}: {CODES[code].title}\n\n{CODES[code].law}\n\n"
    assert tuple(page.sections) == SECTIONS
    assert all(len(text.split()) > 5 for text in page.sections.values())


@pytest.mark.parametrize("code", [code for code in CODES if code not in ON_PAGES])
def test_wrong_layout_has_the_finding_as_shown_and_the_right_one_has_not(code, tmp_path):
    page = page_of(code)
    assert page.block("Wrong", "text") == shown(page, tmp_path)
    right = findings_of(page, "Right", tmp_path)
    assert not of_the_page(page, right)
    # The layout is right, whoever runs it.
    assert not [finding for finding in right if finding.severity == "error" and finding.code != NOT_RUN]


def test_index_lists_every_code_with_its_title_and_every_threshold_with_its_reason():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for code, kind in CODES.items():
        assert f"| [{code}]({code}.md) | {kind.severity} | {kind.title} |" in index
    for what, threshold in THRESHOLDS.items():
        assert f"| {what} | {threshold.value:g} | {threshold.why} |" in index
