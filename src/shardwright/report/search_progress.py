"""The progress of a search: what is priced, the best so far, the least that is left, and the time until its budget ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.report.text.units import pretty_seconds

if TYPE_CHECKING:
    from shardwright.search.searching import Progress as Searching

EVERY_S = 10.0
"""Seconds between two lines, without a terminal."""


@contextmanager
def search_progress(budget_s: float) -> Iterator[Callable[[Searching], None]]:
    """Yields what a search calls. It writes to standard error: standard output has only the result."""
    began = time.monotonic()
    if not sys.stderr.isatty():
        last = [began]

        def line(progress: Searching) -> None:
            if time.monotonic() - last[0] >= EVERY_S:
                last[0] = time.monotonic()
                print(_text(progress), file=sys.stderr, flush=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=budget_s)

        def shown(progress: Searching) -> None:
            bar.update(task, description=_text(progress), completed=time.monotonic() - began)

        yield shown


def _text(progress: Searching) -> str:
    best = progress.best
    parts = [f"{progress.priced:,} priced"]
    if best is not None:
        parts.append(f"best {pretty_seconds(best.seconds)}: {best.arrangement.key}")
    if progress.least_seconds is not None:
        parts.append(f"none left is faster than {pretty_seconds(progress.least_seconds)}")
    return "; ".join(parts)
