"""Regenerate the golden texts of imports: ``python -m tests.interop.regenerate``. Read the diff before you commit it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tests.interop.maxtext_case import FOLDER, findings, meant
from tests.interop.maxtext_cases import CASES


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for stale in set(FOLDER.glob("*.txt")) - {case.path for case in CASES}:
        stale.unlink()
        print(f"removed  {stale.name}")
    for case in CASES:
        with TemporaryDirectory() as folder:
            text = "\n\n".join(finding.text() for finding in meant(case, findings(case, Path(folder)))) + "\n"
        if not case.path.exists() or case.path.read_text(encoding="utf-8") != text:
            case.path.write_text(text, encoding="utf-8")
            print(f"written  {case.path.name}")


if __name__ == "__main__":
    main()
