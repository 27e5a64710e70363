"""Writes the page of a list whose steps were written down before they were priced, docs/published-LIST.md.

python -m benchmarks.published.blind {fresh,second} [--only TEXT]: with --only it prints the rows of some steps, and writes nothing
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.__main__ import Row
from benchmarks.published.steps import FOLDER, Published
from benchmarks.published.tables import by_source, errors_of, printed, sources_of

LISTS = ("fresh", "second")
ROOT = FOLDER.parent.parent
PRICES = "src/shardwright/cost"


def folder_of(name: str) -> Path:
    """The folder of a list's files."""
    return FOLDER / name


def page_of(name: str) -> Path:
    """The page of a list."""
    return ROOT / "docs" / f"published-{name}.md"


def has_experts(step: Published) -> bool:
    """Whether its model is a mixture of experts."""
    return step.model.startswith(("mixtral", "deepseek3"))


def page(name: str, found: Sequence[Row]) -> str:
    """The text of a list's page."""
    start = [
        (folder_of(name) / "page.md").read_text(encoding="utf-8").rstrip(),
        commits(name),
        "## How near",
        summary(found),
    ]
    return "\n\n".join([*start, *by_source(found)]) + "\n"


def summary(found: Sequence[Row]) -> str:
    """The errors of all, of the dense ones, of those of experts, and of each source."""
    groups = {
        "all": list(found),
        "dense": [row for row in found if not has_experts(row.step)],
        "mixtures of experts": [row for row in found if has_experts(row.step)],
        **sources_of(found),
    }
    return errors_of({group: rows for group, rows in groups.items() if rows})


def commits(name: str) -> str:
    """When the steps were listed, and the commit of the prices."""
    listed = _git(
        "log", "--reverse", "--format=%h of %ad", "--date=format:%Y-%m-%d %H:%M", "--", str(folder_of(name))
    ).splitlines()[0]
    prices = _git("log", "-1", "--format=%h of %ad", "--date=format:%Y-%m-%d %H:%M", "--", PRICES)
    return f"The list: commit {listed}. The prices: commit {prices} (`{PRICES}`)."


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Write the page, or print some rows; and the errors of all that is printed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published.blind")
    parser.add_argument("list", choices=LISTS)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="print the rows of steps whose names have it, and write nothing"
    )
    options = parser.parse_args()
    found = printed(folder_of(options.list), options.only)
    if not found:
        parser.error(f"no step of {options.list} has {options.only!r} in its name")
    print(summary(found))
    if not options.only:
        page_of(options.list).write_text(page(options.list, found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
