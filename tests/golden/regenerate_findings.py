"""Regenerate the golden texts of findings, and those in docs/findings: ``python -m tests.golden.regenerate_findings``.

Read the diff before you commit it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.core.findings.codes import CODES
from tests.golden import compiled_case, findings_pages
from tests.golden.compiled_cases import COMPILED_CASES, ON_PAGES
from tests.golden.findings_case import FOLDER, golden_text
from tests.golden.findings_cases import CASES


def main() -> None:
    write_texts(FOLDER, {case.path: golden_text(case) for case in CASES})
    write_texts(compiled_case.FOLDER, {case.path: compiled_case.golden_text(case) for case in COMPILED_CASES})
    with TemporaryDirectory() as folder:
        for code in CODES:
            page = findings_pages.page_of(code)
            case = ON_PAGES.get(code)
            shown = findings_pages.shown(page, Path(folder)) if case is None else compiled_case.first_text(case)
            write_page(page, shown)


def write_texts(folder: Path, texts: Mapping[Path, str]) -> None:
    """Write texts that are new or changed, and remove those of no case."""
    folder.mkdir(exist_ok=True)
    for stale in set(folder.glob("*.txt")) - set(texts):
        stale.unlink()
        print(f"removed  {stale.name}")
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"written  {path.name}")


def write_page(page: findings_pages.Page, shown: str) -> None:
    """Write a finding below a page's wrong layout."""
    old = page.path.read_text(encoding="utf-8")
    head, rest = old.split("```text\n", 1)
    _, tail = rest.split("```\n", 1)
    new = f"{head}```text\n{shown}```\n{tail}"
    if new != old:
        page.path.write_text(new, encoding="utf-8")
        print(f"written  {page.path.name}")


if __name__ == "__main__":
    main()
