"""Writes docs/published.md: every published step beside its plan. ``--check``: fail if it is not up to date.

python -m benchmarks.published [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from statistics import mean, median
from typing import NamedTuple

from benchmarks.published.memory import GIB, parts, reserved_gib
from benchmarks.published.planned import held_by, priced, published_seconds
from benchmarks.published.steps import FOLDER, Published, published

PAGE = FOLDER.parent.parent / "docs" / "published.md"


class Row(NamedTuple):
    """A step beside its plan. ``low`` and ``high``: the range that the plan prints. ``reserved_gib``: what the source's program is
    expected to reserve, where its memory is published."""

    step: Published
    seconds: float
    planned: float
    low: float
    high: float
    planned_gib: float
    reserved_gib: float | None

    @property
    def error(self) -> float:
        return self.planned / self.seconds - 1

    @property
    def memory_error(self) -> float | None:
        """Of the plan, which counts what our program allocates."""
        return None if self.step.memory_gib is None else self.planned_gib / self.step.memory_gib - 1

    @property
    def reserved_error(self) -> float | None:
        """Of what the source's program is expected to reserve."""
        if self.step.memory_gib is None or self.reserved_gib is None:
            return None
        return self.reserved_gib / self.step.memory_gib - 1

    @property
    def held(self) -> bool:
        return self.low <= self.seconds <= self.high


@cache
def rows() -> tuple[Row, ...]:
    """Every published step."""
    return tuple(row_of(step)._replace(reserved_gib=reserved_gib(step)) for step in published())


def row_of(step: Published) -> Row:
    """A step beside its plan, without what its program is expected to reserve."""
    plan = priced(step)
    cost = plan.step
    assert cost is not None
    assert cost.low_seconds is not None
    assert cost.high_seconds is not None
    planned_gib = held_by(step).memory.total_bytes_per_device / GIB
    return Row(step, published_seconds(step), cost.seconds, cost.low_seconds, cost.high_seconds, planned_gib, None)


def page(found: Sequence[Row]) -> str:
    """The page's text."""
    parts_of_page = [(FOLDER / "page.md").read_text(encoding="utf-8").rstrip(), "## How near", _summary(found)]
    about_memory = (FOLDER / "memory.md").read_text(encoding="utf-8").rstrip()
    parts_of_page += ["## Memory, part by part", about_memory, _memory(found)]
    for source in dict.fromkeys(row.step.source for row in found):
        of_source = [row for row in found if row.step.source == source]
        parts_of_page += [f"## {source}", _table(of_source), commands(of_source)]
    return "\n\n".join(parts_of_page) + "\n"


def _summary(found: Sequence[Row]) -> str:
    lines = [
        "| steps | number | mean error of time | median | largest | published time in the range | memory: number | mean error | largest | mean error of the plan alone |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
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
        memory = [abs(row.reserved_error) for row in group if row.reserved_error is not None]
        alone = [abs(row.memory_error) for row in group if row.memory_error is not None]
        held = sum(row.held for row in group)
        lines.append(
            f"| {name} | {len(group)} | {mean(errors):.0%} | {median(errors):.0%} | {max(errors):.0%} | {held} of {len(group)} | "
            f"{len(memory) or '-'} | {f'{mean(memory):.0%} | {max(memory):.0%} | {mean(alone):.0%}' if memory else '- | - | -'} |"
        )
    return "\n".join(lines)


def _table(found: Sequence[Row]) -> str:
    lines = [
        "| step | left out | published, s | planned, s | error | range, s | planned, GiB |",
        "|---|---|---:|---:|---:|---|---:|",
    ]
    for row in found:
        lines.append(
            f"| {row.step.name} | {'yes' if row.step.left_out else ''} | {row.seconds:.3g} | {row.planned:.3g} | {row.error:+.0%} | "
            f"{row.low:.3g} to {row.high:.3g}{'' if row.held else ': outside'} | {row.planned_gib:.1f} |"
        )
    return "\n".join(lines)


def _memory(found: Sequence[Row]) -> str:
    """The steps whose memory is published, part by part."""
    names = [name for name in parts(next(row.step for row in found if row.reserved_gib is not None)) if name != "plan"]
    lines = [
        f"| step | left out | published, GiB | the plan | {' | '.join(names)} | fragments | together | error | error of the plan alone |",
        f"|---|---|---:|---:|{'---:|' * len(names)}---:|---:|---:|---:|",
    ]
    for row in found:
        if row.step.memory_gib is None or row.reserved_gib is None:
            continue
        found_parts = parts(row.step)
        shown = " | ".join(f"{found_parts[name] / GIB:.1f}" for name in names)
        rest = row.reserved_gib - sum(found_parts.values()) / GIB
        lines.append(
            f"| {row.step.name} | {'yes' if row.step.left_out else ''} | {row.step.memory_gib:.1f} | {row.planned_gib:.1f} | {shown} | "
            f"{rest:.1f} | {row.reserved_gib:.1f} | {row.reserved_error:+.0%} | {row.memory_error:+.0%} |"
        )
    return "\n".join(lines)


def commands(found: Sequence[Row]) -> str:
    """Where each step was published, and the command that plans it."""
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
