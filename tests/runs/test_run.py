"""A run on an engine without a framework: its order, its end, and how any engine resumes it."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import latest, open_checkpoint
from shardwright.core.findings.errors import InputError
from shardwright.runs import Connection, RunError, run
from shardwright.runs.loop import Loop
from shardwright.runs.run import _run
from shardwright.training.cluster import Processes
from shardwright.training.options import RunOutcome, Silent
from tests.runs.counting import NOBODY, Counting, counting, go, made, options, plan_of, sums
from tests.runs.test_group import each, free_port, together


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def contents(out: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path): path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def metadata(out: Path) -> dict[str, object]:
    found = latest(out).checkpoint
    assert found is not None
    return dict(found.point.metadata)


def test_every_row_once_in_the_order_of_the_seed(tmp_path: Path) -> None:
    run_options, engine = options(tmp_path), counting()
    ended = go(engine, run_options, checkpoint_every=4)
    assert (ended.ended, ended.step, ended.loss) == ("finished", 6, sums(run_options, 6)[-1])
    assert losses(run_options.out) == sums(run_options, 6)
    assert engine.calls == ["begin 3", "prepare"]
    assert ended.checkpoint is not None
    assert open_checkpoint(ended.checkpoint).point.data_position == 24
    assert sorted(path.name for path in (run_options.out / "checkpoints").glob("step-*")) == [
        "step-00000004",
        "step-00000006",
    ]


def test_the_last_line_has_what_was_planned_beside_what_was_measured(tmp_path: Path) -> None:
    engine = counting()
    engine.peak_bytes = 123
    ended = go(engine, options(tmp_path))
    *others, last = [json.loads(line) for line in ended.metrics.read_text().splitlines()]
    assert (last["measured_bytes"], last["planned_bytes"]) == (123, plan_of().memory.total_bytes_per_device)
    assert "planned_step_s" not in last  # The plan has no chips.
    assert not {name for line in others for name in line if name.startswith(("planned", "measured"))}
    assert ended.measured_bytes == 123
    assert ended.step_s is not None
    assert go(counting(), options(tmp_path), out=tmp_path / "short", steps=2).step_s is None


def test_another_engine_goes_on_under_another_layout(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    assert go(counting(), run_options, stop_after=3).ended == "stopped"
    before = metadata(run_options.out)
    go(counting(name="another", version="9"), run_options, "hsdp", resume=True)
    assert losses(run_options.out) == sums(run_options, 6)
    after = metadata(run_options.out)
    assert after.pop("tokens_seen") > before.pop("tokens_seen")
    assert after == before
    assert "counting" not in before


def test_nothing_is_compiled_where_all_steps_are_done(tmp_path: Path) -> None:
    run_options, engine = options(tmp_path), counting()
    first = go(counting(), run_options)
    ended = go(engine, run_options, resume=True)
    assert (ended.ended, ended.step, ended.loss, ended.checkpoint) == ("finished", 6, None, first.checkpoint)
    assert engine.calls == ["begin 3"]


def test_a_folder_is_required_before_the_engine_is_made(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    run_options.out.write_text("taken")

    def make_engine(*_) -> Counting:
        raise AssertionError("too early")

    with pytest.raises(InputError, match="is not a folder"):
        run(run_options, plan_of(), None, connection=NOBODY, make_engine=make_engine)


def test_a_signal_saves_and_ends_after_the_step_at_hand(tmp_path: Path, monkeypatch) -> None:
    run_options, record = options(tmp_path), Loop._record

    def recorded(self: Loop, step: int, *rest) -> None:
        record(self, step, *rest)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_record", recorded)
    ended = go(counting(), run_options)
    assert (ended.ended, ended.step) == ("interrupted", 2)
    assert ended.checkpoint == run_options.out / "checkpoints" / "step-00000002"


def test_a_step_that_was_not_the_model_s_is_neither_recorded_nor_saved(tmp_path: Path) -> None:
    run_options, engine = options(tmp_path), counting()
    engine.overflow_at = 3
    with pytest.raises(RunError):
        go(engine, run_options, checkpoint_every=1)
    assert losses(run_options.out) == sums(run_options, 2)
    assert sorted(path.name for path in (run_options.out / "checkpoints").glob("step-*")) == [
        "step-00000001",
        "step-00000002",
    ]


def by_two(folder: Path, engines: list[Counting], connection: Connection = NOBODY, **changes) -> list[RunOutcome]:
    """How a run by two ended, with a thread for each process."""
    run_options, port = options(folder), free_port()
    where = [
        Processes(count=2, index=index, coordinator=f"localhost:{port}", found="a test", join_timeout_s=60)
        for index in range(2)
    ]

    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(
                lambda index: go(engines[index], run_options, connection=connection, processes=where[index], **changes),
                range(2),
            )
        )


def test_two_processes_read_and_save_their_own_rows(tmp_path: Path) -> None:
    connected: list[str] = []
    connection = Connection(
        connect=lambda processes: connected.append(f"connect {processes.index}"),
        disconnect=lambda: connected.append("disconnect"),
    )
    ended = by_two(tmp_path, [counting(offsets=(0, 1)), counting(offsets=(2, 3))], connection)
    assert [outcome.step for outcome in ended] == [6, 6]
    assert sorted(connected[:2]) == ["connect 0", "connect 1"]
    assert connected[2:] == ["disconnect"] * 2
    saved = open_checkpoint(tmp_path / "out" / "checkpoints" / "step-00000006").read_box("sums")
    assert np.sum(saved[:, 0]) == sums(options(tmp_path), 6)[-1]


def test_two_processes_with_different_versions_do_not_begin(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    engines = [counting(offsets=(0, 1), version="1"), counting(offsets=(2, 3), version="2")]
    with together(2) as groups:
        errors = each(groups, lambda group: _run(run_options, plan_of(), Silent(), group, made(engines[group.index])))
    assert [str(error) for error in errors] == [
        "before the first step: the 2 processes of this run do not agree:\n"
        "  counting: '1' in process 0, '2' in process 1\n"
        "Give all of them the same command, text and files. Nothing was started."
    ] * 2
    assert [engine.calls for engine in engines] == [[], []]
    assert not run_options.out.exists()
