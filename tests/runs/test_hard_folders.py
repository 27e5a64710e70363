"""A full disk, a folder that may not be written, and two runs in one folder, with saves of both kinds, by one process and by two."""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwright.checkpoint import verify
from shardwright.core.findings.errors import InputError
from shardwright.runs import background
from shardwright.runs.run import _run
from shardwright.training.options import RunOptions, Silent
from tests.checkpoint.states import largest_file, read_only
from tests.runs.counting import ROWS, counting, go, made, options, plan_of, sums
from tests.runs.test_background import steps_saved, write_part
from tests.runs.test_group import each, together
from tests.runs.test_run import contents

KINDS = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
COUNTS = pytest.mark.parametrize("count", [1, 2])


@pytest.fixture
def run_options() -> Iterator[RunOptions]:
    """Of a run that has saved steps 1 and 2, in a folder that every user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    made_options = options(folder)
    go(counting(), made_options, checkpoint_every=1, stop_after=2)
    yield made_options
    shutil.rmtree(folder)


def by(count: int, run_options: RunOptions, *, resume: bool = True, **changes: Any) -> list[Any]:
    """How the processes ended, each with its outcome or its error."""
    changed = replace(run_options, checkpoint_every=1, resume=resume, **changes)
    if count == 1:
        try:
            return [go(counting(), changed)]
        except InputError as error:
            return [error]
    engines = [counting(offsets=range(2)), counting(offsets=range(2, ROWS))]
    with together(count) as groups:
        return each(groups, lambda group: _run(changed, plan_of(), Silent(), group, made(engines[group.index])))


def ends_with(
    hardship: AbstractContextManager[None], message: str, run_options: RunOptions, count: int, *, asynchronous: bool
) -> None:
    """A run of which step 3 cannot be saved ends with the message, changes no earlier step, and goes on later."""
    checkpoints = run_options.out / "checkpoints"
    before = contents(checkpoints)
    with hardship:
        ended = by(count, run_options, async_checkpoints=asynchronous)
    assert all(isinstance(one, InputError) for one in ended), ended
    assert re.fullmatch(
        re.escape(f"{checkpoints}/step-00000003: this checkpoint could not be written: ")
        + message
        + " Nothing of it was kept, and earlier checkpoints are as they were[.]",
        str(ended[0]),
    ), str(ended[0])
    if count > 1:
        assert "step 3" in str(ended[1]) or "step-00000003" in str(ended[1])
    assert contents(checkpoints) == before
    assert [one.step for one in by(count, run_options, async_checkpoints=asynchronous)] == [6] * count
    assert steps_saved(run_options.out) == dict(enumerate(sums(run_options, 6), 1))
    assert verify(run_options.out)["ok"]


@KINDS
@COUNTS
def test_a_full_disk(run_options: RunOptions, count: int, asynchronous: bool) -> None:
    ends_with(
        largest_file(2000),
        r"File too large[.] Free some space, then go on with --resume[.]",
        run_options,
        count,
        asynchronous=asynchronous,
    )


@KINDS
@COUNTS
def test_a_folder_that_may_not_be_written_any_more(run_options: RunOptions, count: int, asynchronous: bool) -> None:
    # The run's own folder may be written, and its metrics are: only its checkpoints may not.
    for path in (run_options.out, run_options.out / "metrics.jsonl"):
        path.chmod(0o777)
    ends_with(
        read_only(run_options.out / "checkpoints"),
        r"Permission denied(?: \(\S+\))?[.] Give a writable directory with --out[.]",
        run_options,
        count,
        asynchronous=asynchronous,
    )


@KINDS
def test_a_folder_that_may_not_be_written_at_all(run_options: RunOptions, asynchronous: bool) -> None:
    before = contents(run_options.out)
    with read_only(run_options.out):
        (ended,) = by(1, run_options, async_checkpoints=asynchronous)
    assert isinstance(ended, InputError)
    assert str(ended) in (
        f"--out {run_options.out}: {run_options.out} may not be written. Give a folder that may.",
        # Of a user whose real identity is another one, only the attempt shows it.
        f"{run_options.out}/.lock cannot be written: Permission denied. Give a folder that can be written with --out.",
    )
    assert contents(run_options.out) == before


def test_a_second_run_while_a_save_is_in_flight(run_options: RunOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    second: list[Any] = []
    refused = threading.Event()

    def held(save: Any, *arguments: Any, **named: Any) -> None:
        if save.step == 3:
            before = contents(run_options.out)
            for resume in (True, False):
                second.extend(by(1, run_options, resume=resume, async_checkpoints=True))
            changed = {path for path, data in contents(run_options.out).items() if before.get(path) != data}
            # Only the first run writes meanwhile.
            assert all(path.endswith("metrics.jsonl") for path in changed), changed
            refused.set()
        write_part(save, *arguments, **named)

    monkeypatch.setattr(background, "write_part", held)
    (ended,) = by(1, run_options, async_checkpoints=True)
    assert refused.is_set()
    assert len(second) == 2
    assert all(str(one).startswith(f"{run_options.out} is held by another run: ") for one in second), second
    assert ended.step == 6
    assert steps_saved(run_options.out) == dict(enumerate(sums(run_options, 6), 1))
