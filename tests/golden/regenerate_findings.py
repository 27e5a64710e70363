"""Write the golden texts of findings anew, and those in docs/findings: ``python -m tests.golden.regenerate_findings``.

Read the diff before you commit it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from shardwright.core.codes import CODES
from tests.golden import findings_pages
from tests.golden.findings_case import FOLDER, golden_text
from tests.golden.findings_cases import CASES


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for stale in set(FOLDER.glob("*.txt")) - {case.path for case in CASES}:
        stale.unlink()
        print(f"removed  {stale.name}")
    for case in CASES:
        text = golden_text(case)
        if not case.path.exists() or case.path.read_text(encoding="utf-8") != text:
            case.path.write_text(text, encoding="utf-8")
            print(f"written  {case.path.name}")
    with TemporaryDirectory() as folder:
        for code in CODES:
            write_page(findings_pages.page_of(code), Path(folder))


def write_page(page: findings_pages.Page, folder: Path) -> None:
    """Put what the command says under a page's wrong layout."""
    old = page.path.read_text(encoding="utf-8")
    head, rest = old.split("```text\n", 1)
    _, tail = rest.split("```\n", 1)
    new = f"{head}```text\n{findings_pages.shown(page, folder)}```\n{tail}"
    if new != old:
        page.path.write_text(new, encoding="utf-8")
        print(f"written  {page.path.name}")


if __name__ == "__main__":
    main()
