"""Writes docs/published.md: every published step beside its plan. ``--check``: fail if it is not up to date.

python -m benchmarks.published [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from statistics import mean, median
from typing import NamedTuple

from benchmarks.published.planned import priced, published_seconds
from benchmarks.published.steps import FOLDER, Published, published

PAGE = FOLDER.parent.parent / "docs" / "published.md"
GIB = 1024**3


class Row(NamedTuple):
    """A step beside its plan. ``low`` and ``high``: the range that the plan prints."""

    step: Published
    seconds: float
    planned: float
    low: float
    high: float
    planned_gib: float

    @property
    def error(self) -> float:
        return self.planned / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        return None if self.step.memory_gib is None else self.planned_gib / self.step.memory_gib - 1

    @property
    def held(self) -> bool:
        return self.low <= self.seconds <= self.high


@cache
def rows() -> tuple[Row, ...]:
    """Every published step."""
    found = []
    for step in published():
        plan = priced(step)
        cost = plan.step
        assert cost is not None
        assert cost.low_seconds is not None
        assert cost.high_seconds is not None
        planned_gib = plan.memory.total_bytes_per_device / GIB
        seconds = published_seconds(step)
        found.append(Row(step, seconds, cost.seconds, cost.low_seconds, cost.high_seconds, planned_gib))
    return tuple(found)


def page(found: Sequence[Row]) -> str:
    """The page's text."""
    parts = [(FOLDER / "page.md").read_text(encoding="utf-8").rstrip(), "## How near", _summary(found)]
    for source in dict.fromkeys(row.step.source for row in found):
        of_source = [row for row in found if row.step.source == source]
        parts += [f"## {source}", _table(of_source), _commands(of_source)]
    return "\n\n".join(parts) + "\n"


def _summary(found: Sequence[Row]) -> str:
    lines = [
        "| steps | number | mean error of time | median | largest | published time in the range | memory: number | mean error |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    groups = [
        ("left out", [row for row in found if row.step.left_out]),
        ("not left out", [row for row in found if not row.step.left_out]),
        *(
            (f"left out, {source}", [row for row in found if row.step.source == source and row.step.left_out])
            for source in dict.fromkeys(row.step.source for row in found)
        ),
    ]
    for name, group in groups:
        errors = [abs(row.error) for row in group]
        memory = [abs(row.memory_error) for row in group if row.memory_error is not None]
        held = sum(row.held for row in group)
        lines.append(
            f"| {name} | {len(group)} | {mean(errors):.0%} | {median(errors):.0%} | {max(errors):.0%} | {held} of {len(group)} | "
            f"{len(memory) or '-'} | {f'{mean(memory):.0%}' if memory else '-'} |"
        )
    return "\n".join(lines)


def _table(found: Sequence[Row]) -> str:
    lines = [
        "| step | left out | published, s | planned, s | error | range, s | published, GiB | planned, GiB | error |",
        "|---|---|---:|---:|---:|---|---:|---:|---:|",
    ]
    for row in found:
        memory = row.memory_error
        lines.append(
            f"| {row.step.name} | {'yes' if row.step.left_out else ''} | {row.seconds:.3g} | {row.planned:.3g} | {row.error:+.0%} | "
            f"{row.low:.3g} to {row.high:.3g}{'' if row.held else ': outside'} | "
            f"{'-' if memory is None else f'{row.step.memory_gib:.1f}'} | {row.planned_gib:.1f} | "
            f"{'-' if memory is None else f'{memory:+.0%}'} |"
        )
    return "\n".join(lines)


def _commands(found: Sequence[Row]) -> str:
    lines = ["```text"]
    for row in found:
        lines.append(f"{row.step.name}: {row.step.at}")
        lines.append(f"  shardwright plan {row.step.plan}")
        if row.step.differs:
            lines.append(f"  not said: {'; '.join(row.step.differs)}")
    return "\n".join([*lines, "```"])


def main() -> int:
    """Write the page, or compare it."""
    text = page(rows())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    print("docs/published.md is not what `python -m benchmarks.published` writes", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
