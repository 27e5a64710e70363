"""Writes docs/published-later.md: python -m benchmarks.published.later [--only TEXT]: prints the rows of some steps, and writes nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.published.__main__ import Row, commands, row_of
from benchmarks.published.__main__ import rows as rows_of_the_first
from benchmarks.published.later.pairs import pairs, section
from benchmarks.published.steps import FOLDER, steps_of

HERE = Path(__file__).parent
WIDER = HERE / "wider"
"""Steps that the tables leave out, for what no option says: they have one of their own."""
EXPERTS = "mixtures of experts, dropless"
PAGE = FOLDER.parent.parent / "docs" / "published-later.md"
HEADER = "| step | published, s | planned, s | error | range, s | published, GiB | planned, GiB |"


def page(found: Sequence[Row], wider: Sequence[Row]) -> str:
    """The page's text. ``wider``: the steps that the tables of the sources leave out."""
    start = [(HERE / "page.md").read_text(encoding="utf-8").rstrip(), "## How near", summary(found, wider)]
    about_pairs = (HERE / "pairs.md").read_text(encoding="utf-8").rstrip()
    start += ["## The order of layouts", about_pairs, section(pairs([*rows_of_the_first(), *found, *wider]))]
    return "\n\n".join([*start, *by_source([*found, *wider])]) + "\n"


def by_source(found: Sequence[Row]) -> list[str]:
    """Of each source its heading, its table and its commands."""
    sections: list[str] = []
    for source, of_source in sources_of(found).items():
        table = "\n".join([HEADER, "|---|---:|---:|---:|---|---:|---:|", *(line(row) for row in of_source)])
        sections += [f"## {source}", table, commands(of_source)]
    return sections


def summary(found: Sequence[Row], wider: Sequence[Row]) -> str:
    """The errors of each source, and of all; those of experts also with the steps that the tables leave out."""
    groups = {"all": list(found), **sources_of(found)}
    groups |= {wider[0].step.source: list(wider), "all experts, with those left out": [*groups[EXPERTS], *wider]}
    return errors_of(groups)


def sources_of(found: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each source."""
    return {
        source: [row for row in found if row.step.source == source]
        for source in dict.fromkeys(row.step.source for row in found)
    }


def errors_of(groups: Mapping[str, Sequence[Row]]) -> str:
    """A table of the errors of each group."""
    lines = [
        "| steps | number | mean error of time | median, with its sign | largest | published time in the range |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, group in groups.items():
        errors = [row.error for row in group]
        sizes = [abs(error) for error in errors]
        lines.append(
            f"| {name} | {len(group)} | {mean(sizes):.0%} | {median(errors):+.0%} | {max(sizes):.0%} | "
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
    found: dict[Path, list[Row]] = {HERE: [], WIDER: []}
    for folder, rows in found.items():
        for step in steps_of(folder):
            if only is None or only in step.name:
                rows.append(row_of(step))
                print(line(rows[-1]), flush=True)
    if only is None:
        PAGE.write_text(page(found[HERE], found[WIDER]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
