"""The progress of a run: on a terminal a bar with loss, tokens/s and time left; elsewhere some lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwright.training.options import Listener, StepRecord, write_why

LINES = 10
"""The least number of lines over a run, without a terminal."""
LOG_FILE = "log.txt"
"""What a run printed, in its folder."""

MOST_SECONDS = 60
"""The longest time without a line, where a step takes no longer."""


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
    """Lines in a file or a pipe: of each ``every`` steps; None: ten over a run, and one a minute at least."""

    def __init__(self, write: Callable[[str], None], every: int | None = None) -> None:
        self._write, self._asked, self._every, self._last, self._written_s = write, every, 1, 0, 0.0

    def say(self, text: str) -> None:
        self._write(text)

    def doing(self, text: str) -> None:
        self._write(f"{text} ...")

    def begin(self, first: int, last: int) -> None:
        self._every, self._last = self._asked or max(1, (last - first) // LINES), last
        self._written_s = time.monotonic()

    def step(self, record: StepRecord) -> None:
        late = self._asked is None and time.monotonic() - self._written_s >= MOST_SECONDS
        if late or record.step % self._every == 0 or record.step in (1, self._last):
            self._written_s = time.monotonic()
            self._write(f"step {record.step:>{len(str(self._last))}}/{self._last}  {progress_line(record)}")

    def end(self, why: str, exit_code: int) -> None:
        del exit_code
        write_why(why)


class Logged:
    """A listener whose lines also go to ``log.txt`` in the folder of the run, from the moment when the run writes there."""

    def __init__(self, shown: Listener, out: Path, every: int | None) -> None:
        self._shown, self._out, self._waiting = shown, out, list[str]()
        self._began = False
        self._lines = Lines(self.write, every)

    def write(self, text: str) -> None:
        """A line of the log alone: with its time. Lines from before the run writes in its folder are kept until then."""
        self._waiting += [f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}  {line}".rstrip() for line in text.split("\n")]
        if self._began:
            # A log that cannot be written ends no run: what matters is in the metrics, whose error names the folder.
            with suppress(OSError), (self._out / LOG_FILE).open("a", encoding="utf-8", errors="replace") as file:
                file.write("".join(f"{line}\n" for line in self._waiting))
            self._waiting.clear()

    def say(self, text: str) -> None:
        self._shown.say(text)
        self._lines.say(text)

    def doing(self, text: str) -> None:
        self._shown.doing(text)
        self._lines.doing(text)

    def begin(self, first: int, last: int) -> None:
        self._began = True
        self._shown.begin(first, last)
        self._lines.begin(first, last)

    def step(self, record: StepRecord) -> None:
        self._shown.step(record)
        self._lines.step(record)

    def end(self, why: str, exit_code: int) -> None:
        self.write(f"shardwright: {why}")
        self._shown.end(why, exit_code)


def progress_line(record: StepRecord) -> str:
    """Loss and speed, of one width from step to step."""
    return f"loss {record.loss:7.4f}  {record.tokens_per_s:>9,.0f} tokens/s"


@contextmanager
def run_progress(log_every: int | None = None) -> Iterator[Listener]:
    """A bar where standard output is a terminal, lines elsewhere: of each ``log_every`` steps."""
    if not sys.stdout.isatty():
        yield Lines(partial(print, flush=True), log_every)
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
