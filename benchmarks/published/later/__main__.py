"""Writes docs/published-later.md: python -m benchmarks.published.later [--only TEXT]: prints the rows of some steps, and writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.published.__main__ import Row, commands, row_of
from benchmarks.published.steps import FOLDER, steps_of

HERE = Path(__file__).parent
PAGE = FOLDER.parent.parent / "docs" / "published-later.md"
HEADER = "| step | published, s | planned, s | error | range, s | published, GiB | planned, GiB |"


def page(found: Sequence[Row]) -> str:
    """The page's text."""
    sources = dict.fromkeys(row.step.source for row in found)
    sections = [(HERE / "page.md").read_text(encoding="utf-8").rstrip(), "## How near", summary(found)]
    for source in sources:
        of_source = [row for row in found if row.step.source == source]
        table = "\n".join([HEADER, "|---|---:|---:|---:|---|---:|---:|", *(line(row) for row in of_source)])
        sections += [f"## {source}", table, commands(of_source)]
    return "\n\n".join(sections) + "\n"


def summary(found: Sequence[Row]) -> str:
    """The errors of each source, and of all."""
    lines = [
        "| steps | number | mean error of time | median, with its sign | largest | published time in the range |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name in (None, *dict.fromkeys(row.step.source for row in found)):
        group = [row for row in found if name in (None, row.step.source)]
        errors = [row.error for row in group]
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {name or 'all'} | {len(group)} | {mean(sizes):.0%} | {median(errors):+.0%} | {max(sizes):.0%} | "
            f"{sum(row.held for row in group)} of {len(group)} |"
        )
    return "\n".join(lines)


def line(row: Row) -> str:
    """A step's row of its table."""
    memory = "-" if row.step.memory_gib is None else f"{row.step.memory_gib:.1f}"
    return (
        f"| {row.step.name} | {row.seconds:.3g} | {row.planned:.3g} | {row.error:+.0%} | "
        f"{row.low:.3g} to {row.high:.3g}{'' if row.held else ': outside'} | {memory} | {row.planned_gib:.1f} |"
    )


def main() -> int:
    """Write the page, or print some rows."""
    only = sys.argv[2] if sys.argv[1:2] == ["--only"] else None
    found = []
    for step in steps_of(HERE):
        if only is None or only in step.name:
            found.append(row_of(step))
            print(line(found[-1]), flush=True)
    if only is None:
        PAGE.write_text(page(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
