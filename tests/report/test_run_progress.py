"""The progress of a run: lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import io
import itertools

from rich.console import Console
from rich.progress import Progress

from shardwright.report import run_progress as run_progress_module
from shardwright.report.run_progress import Bar, run_progress
from shardwright.training.options import StepRecord


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=7.5 / step, grad_norm=1.0, tokens=512, tokens_per_s=12345.6, step_s=0.04)


def test_lines_where_there_is_no_terminal(capsys) -> None:
    with run_progress() as shown:
        shown.doing("compiling the step")
        shown.begin(20, 120)
        for step in range(21, 121):
            shown.step(record(step))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling the step ..."
    assert lines[1] == "step  30/120  loss  0.2500     12,346 tokens/s"
    assert [line.split("/")[0] for line in lines[1:]] == [f"step {step:>3}" for step in range(30, 121, 10)]
    assert len({line.index("loss") for line in lines[1:]}) == 1


def test_a_bar_shows_loss_speed_and_place() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=100)
    with Progress("{task.description}", "{task.completed}/{task.total}", "{task.fields[line]}", console=console) as bar:
        shown = Bar(bar)
        shown.say("text: 12 tokens")
        shown.begin(10, 20)
        shown.step(record(15))
    text = written.getvalue()
    assert "text: 12 tokens" in text
    assert "training 15/20 loss  0.5000     12,346 tokens/s" in text


def test_a_line_a_minute_at_least_and_each_n_steps_where_that_is_asked(capsys, monkeypatch) -> None:
    def lines(seconds_a_step: float, every: int | None) -> list[str]:
        with run_progress(every) as shown:
            clock = itertools.count(0, seconds_a_step)
            monkeypatch.setattr(run_progress_module.time, "monotonic", lambda: next(clock))
            shown.begin(0, 1000)
            for step in range(1, 1001):
                shown.step(record(step))
        return capsys.readouterr().out.splitlines()

    assert len(lines(0.0, None)) == 11
    # The clock is read twice for a line that is printed: with 10 s each, no more than six steps lie between two lines.
    printed = [int(line.split()[1].split("/")[0]) for line in lines(10.0, None)]
    assert max(after - before for before, after in itertools.pairwise(printed)) <= 6
    assert len(lines(10.0, 100)) == 11
