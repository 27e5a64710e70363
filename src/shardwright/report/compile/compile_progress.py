"""The progress of a compiler: what it does and for how long; one line per task where there is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def compile_progress() -> Iterator[Callable[[str], None]]:
    """Yields ``doing(text)``, to call when a task begins. It writes to standard error: standard output has only the result."""
    if not sys.stderr.isatty():

        def line(text: str) -> None:
            print(f"{text} ...", file=sys.stderr, flush=True)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def doing(text: str) -> None:
            bar.reset(task, description=text, start=True)

        yield doing
