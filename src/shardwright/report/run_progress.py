"""The progress of a run: on a terminal a bar with loss, tokens/s and time left; elsewhere some lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.training.options import Listener, StepRecord, write_why

LINES = 10
"""The number of lines over a run, without a terminal."""


class Bar:
    """A bar on a terminal."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=None, line="")

    def say(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def doing(self, text: str) -> None:
        self._progress.update(self._task, description=text, total=None)

    def begin(self, first: int, last: int) -> None:
        self._progress.reset(self._task, total=last, completed=first, description="training", start=True)

    def step(self, record: StepRecord) -> None:
        self._progress.update(self._task, completed=record.step, line=progress_line(record))

    def end(self, why: str, exit_code: int) -> None:
        del exit_code
        self._progress.console.show_cursor()
        write_why(why)


class Lines:
    """Lines in a file or a pipe."""

    def __init__(self) -> None:
        self._every, self._last = 1, 0

    def say(self, text: str) -> None:
        print(text, flush=True)

    def doing(self, text: str) -> None:
        print(f"{text} ...", flush=True)

    def begin(self, first: int, last: int) -> None:
        self._every, self._last = max(1, (last - first) // LINES), last

    def step(self, record: StepRecord) -> None:
        if record.step % self._every == 0 or record.step in (1, self._last):
            print(f"step {record.step:>{len(str(self._last))}}/{self._last}  {progress_line(record)}", flush=True)

    def end(self, why: str, exit_code: int) -> None:
        del exit_code
        write_why(why)


def progress_line(record: StepRecord) -> str:
    """Loss and speed, of one width from step to step."""
    return f"loss {record.loss:7.4f}  {record.tokens_per_s:>9,.0f} tokens/s"


@contextmanager
def run_progress() -> Iterator[Listener]:
    """A bar where standard output is a terminal, lines elsewhere."""
    if not sys.stdout.isatty():
        yield Lines()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(), transient=False) as bar:
        yield Bar(bar)
