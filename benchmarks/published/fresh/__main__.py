"""Writes docs/published-fresh.md: python -m benchmarks.published.fresh [--only TEXT]: prints the rows of some steps, and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.__main__ import Row, row_of
from benchmarks.published.later.__main__ import by_source, errors_of, line, sources_of
from benchmarks.published.steps import FOLDER, Published, steps_of

HERE = Path(__file__).parent
ROOT = FOLDER.parent.parent
PAGE = ROOT / "docs" / "published-fresh.md"
PRICES = "src/shardwright/cost"


def has_experts(step: Published) -> bool:
    """Whether its model is a mixture of experts."""
    return step.model.startswith(("mixtral", "deepseek3"))


def page(found: Sequence[Row]) -> str:
    """The page's text."""
    groups = {
        "all": list(found),
        "dense": [row for row in found if not has_experts(row.step)],
        "mixtures of experts": [row for row in found if has_experts(row.step)],
        **sources_of(found),
    }
    start = [(HERE / "page.md").read_text(encoding="utf-8").rstrip(), commits(), "## How near", errors_of(groups)]
    return "\n\n".join([*start, *by_source(found)]) + "\n"


def commits() -> str:
    """When the steps were listed, and the commit of the prices."""
    listed = _git(
        "log", "--reverse", "--format=%h of %ad", "--date=format:%Y-%m-%d %H:%M", "--", str(HERE)
    ).splitlines()[0]
    prices = _git("log", "-1", "--format=%h of %ad", "--date=format:%Y-%m-%d %H:%M", "--", PRICES)
    return f"The list: commit {listed}. The prices: commit {prices} (`{PRICES}`)."


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Write the page, or print some rows; and the errors of all that is printed."""
    only = sys.argv[2] if sys.argv[1:2] == ["--only"] else ""
    found: list[Row] = []
    for step in steps_of(HERE):
        if only in step.name:
            found.append(row_of(step))
            print(line(found[-1]), flush=True)
    print(errors_of({"all": found, **sources_of(found)}))
    if not only:
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
