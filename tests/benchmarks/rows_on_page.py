"""The rows of the pages of published steps, as they stand and as a plan makes them anew."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from benchmarks.published.__main__ import row_of
from benchmarks.published.steps import Published
from benchmarks.published.tables import line

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?![\w.])")


def rows_on_page(page: Path, names: Collection[str]) -> dict[str, str]:
    """The rows of some steps, by their names."""
    rows = [row for row in page.read_text(encoding="utf-8").splitlines() if row.startswith("| ")]
    return {name: row for row in rows for name in [row.split(" | ")[0].removeprefix("| ")] if name in names}


def check_steps(page: Path, steps: Collection[Published]) -> None:
    """Each step has a row, a command, a source, and one published number."""
    text, names = page.read_text(encoding="utf-8"), {step.name for step in steps}
    assert len(names) == len(steps)
    assert set(rows_on_page(page, names)) == names
    for step in steps:
        assert f"{step.name}: {step.at}\n  shardwright plan {step.plan}\n" in text
        assert (step.seconds is None) != (step.tokens_per_s is None)


def check_anew(written: str, step: Published) -> None:
    """A row is what its plan writes now, within the last digits."""
    now = line(row_of(step))
    assert NUMBER.sub("N", written) == NUMBER.sub("N", now)
    for first, second in zip(NUMBER.findall(written), NUMBER.findall(now), strict=True):
        assert abs(float(first) - float(second)) <= max(2, 0.02 * abs(float(second)))
