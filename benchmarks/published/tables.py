"""The tables of lists of published steps: the rows of each source with their commands, and the errors of groups of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from benchmarks.published.__main__ import Row, commands, row_of
from benchmarks.published.steps import steps_of

HEADER = "| step | published, s | planned, s | error | range, s | published, GiB | planned, GiB |"


def printed(folder: Path, only: str) -> list[Row]:
    """The rows of a folder's steps whose names have ``only``, each printed as soon as it is planned."""
    rows: list[Row] = []
    for step in steps_of(folder):
        if only in step.name:
            rows.append(row_of(step))
            print(line(rows[-1]), flush=True)
    return rows


def by_source(found: Sequence[Row]) -> list[str]:
    """Of each source its heading, its table and its commands."""
    sections: list[str] = []
    for source, of_source in sources_of(found).items():
        table = "\n".join([HEADER, "|---|---:|---:|---:|---|---:|---:|", *(line(row) for row in of_source)])
        sections += [f"## {source}", table, commands(of_source)]
    return sections


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
