"""Write the golden texts of findings anew: ``python -m tests.golden.regenerate_findings``. Read the diff before you commit it."""

from __future__ import annotations

from tests.golden.findings_cases import CASES, FOLDER, golden_text


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


if __name__ == "__main__":
    main()
