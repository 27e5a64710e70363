"""The progress of a search: what is priced, the best so far, the least that is left, and the time until its budget ends; then what is compiled."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from shardwright.report.text.units import pretty_seconds

if TYPE_CHECKING:
    from shardwright.search.compiled import CompileProgress
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


@contextmanager
def compiling_progress() -> Iterator[Callable[[CompileProgress], None]]:
    """Yields what compiling answers calls; a line for each where there is no terminal."""
    if not sys.stderr.isatty():
        last = [""]

        def line(progress: CompileProgress) -> None:
            text = _compiling(progress)
            if f"{progress.number} {progress.text}" != last[0]:
                last[0] = f"{progress.number} {progress.text}"
                print(f"{text} ...", file=sys.stderr, flush=True)

        yield line
        return
    with Progress(
        SpinnerColumn(), TextColumn("{task.description}"), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("compiling", total=None)
        yield lambda progress: bar.update(task, description=_compiling(progress))


def _compiling(progress: CompileProgress) -> str:
    left = "" if progress.left_s is None else f", about {pretty_seconds(progress.left_s)} left"
    return f"compiling {progress.number} of {progress.wanted}: {progress.text}{left}"


def _text(progress: Searching) -> str:
    best = progress.best
    parts = [f"{progress.priced:,} priced"]
    if best is not None:
        parts.append(f"best {pretty_seconds(best.seconds)}: {best.arrangement.key}")
    if progress.least_seconds is not None:
        parts.append(f"none left is faster than {pretty_seconds(progress.least_seconds)}")
    return "; ".join(parts)
