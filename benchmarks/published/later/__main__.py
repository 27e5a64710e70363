"""Writes docs/published-later.md: python -m benchmarks.published.later [--only TEXT]: prints the rows of some steps, and writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.published.__main__ import Row
from benchmarks.published.__main__ import rows as rows_of_the_first
from benchmarks.published.later.pairs import pairs, section
from benchmarks.published.steps import FOLDER
from benchmarks.published.tables import by_source, errors_of, printed, sources_of

HERE = Path(__file__).parent
WIDER = HERE / "wider"
"""Steps that the tables leave out, for what no option says: they have one of their own."""
EXPERTS = "mixtures of experts, dropless"
PAGE = FOLDER.parent.parent / "docs" / "published-later.md"


def page(found: Sequence[Row], wider: Sequence[Row]) -> str:
    """The page's text. ``wider``: the steps that the tables of the sources leave out."""
    start = [(HERE / "page.md").read_text(encoding="utf-8").rstrip(), "## How near", summary(found, wider)]
    about_pairs = (HERE / "pairs.md").read_text(encoding="utf-8").rstrip()
    start += ["## The order of layouts", about_pairs, section(pairs([*rows_of_the_first(), *found, *wider]))]
    return "\n\n".join([*start, *by_source([*found, *wider])]) + "\n"


def summary(found: Sequence[Row], wider: Sequence[Row]) -> str:
    """The errors of each source, and of all; those of experts also with the steps that the tables leave out."""
    groups = {"all": list(found), **sources_of(found)}
    groups |= {wider[0].step.source: list(wider), "all experts, with those left out": [*groups[EXPERTS], *wider]}
    return errors_of(groups)


def main() -> int:
    """Write the page, or print some rows."""
    only = sys.argv[2] if sys.argv[1:2] == ["--only"] else ""
    found, wider = printed(HERE, only), printed(WIDER, only)
    if not only:
        PAGE.write_text(page(found, wider), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
