"""Regenerate the golden files of resolved layouts: ``python -m tests.golden.regenerate``. Read the diff before you commit it."""

from __future__ import annotations

from tests.golden.layouts_matrix import FOLDER, cases, golden_text, make, path_of


def main() -> None:
    wanted = {path_of(*case): case for case in cases()}
    for stale in set(FOLDER.glob("*/*.txt")) - set(wanted):
        stale.unlink()
        print(f"removed  {stale.relative_to(FOLDER)}")
    for path, case in wanted.items():
        text = golden_text(make(*case))
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"written  {path.relative_to(FOLDER)}")


if __name__ == "__main__":
    main()
