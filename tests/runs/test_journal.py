"""``metrics.jsonl``: each step once, whatever was written before, and what cannot be written said in one message."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwright.core.errors import InputError
from shardwright.core.run import StepRecord
from shardwright.runs.journal import Journal, board_writer, journal, require_folder


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=7.5 - step, grad_norm=1.25, tokens=96, tokens_per_s=960.0, step_s=0.1)


def write(out: Path, first: int, last: int) -> None:
    with journal(out, first_step=first, writer=None) as records:
        for step in range(first + 1, last + 1):
            records.write(record(step))


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    write(tmp_path / "new" / "run", 0, 1)
    assert (tmp_path / "new" / "run" / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 6.5, "grad_norm": 1.25, "tokens": 96, "tokens_per_s": 960.0, "step_s": 0.1, "dropped": 0}\n'
    )


def test_a_line_is_there_when_it_is_written(tmp_path: Path) -> None:
    with journal(tmp_path, first_step=0, writer=None) as records:
        records.write(record(1))
        assert steps(tmp_path) == [1]


def test_steps_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 4, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    write(tmp_path, 0, 1)
    assert steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("broken", ['{"step": 5, "lo', '{"step": 5}', "\xff\x00", "[]\n", '{"loss": 1}\n'])
def test_a_line_that_was_cut_off_is_dropped(broken: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(broken.encode("latin-1"))
    write(tmp_path, 4, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


class Board:
    def __init__(self, logdir: str, *, purge_step: int) -> None:
        self.told: list[Any] = [(logdir, purge_step)]

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.told.append((tag, scalar_value, global_step))

    def close(self) -> None:
        self.told.append("closed")


def test_a_board_is_told_what_a_person_looks_at_and_is_closed(tmp_path: Path) -> None:
    boards: list[Board] = []

    def writer(logdir: str, *, purge_step: int) -> Board:
        boards.append(Board(logdir, purge_step=purge_step))
        return boards[0]

    with journal(tmp_path, first_step=4, writer=writer) as records:
        records.write(record(5))
    assert boards[0].told == [
        (str(tmp_path / "tensorboard"), 5),
        ("loss", 2.5, 5),
        ("grad_norm", 1.25, 5),
        ("tokens_per_s", 960.0, 5),
        "closed",
    ]


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    with journal(tmp_path, first_step=0, writer=board_writer()) as records:
        records.write(record(1))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.name.startswith("events.out.tfevents.")
    assert b"grad_norm" in events.read_bytes()


def test_a_missing_tensorboard_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError) as error:
        board_writer()
    assert str(error.value) == (
        "--tensorboard needs the package tensorboardX. Install it: pip install 'shardwright[tensorboard]'."
    )


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError) as error, journal(tmp_path, first_step=0, writer=None):
        pass
    assert str(error.value) == (
        f"{tmp_path}/metrics.jsonl.partial cannot be written: Is a directory. "
        "Give a folder that can be written with --out."
    )


def test_a_full_disk_is_said() -> None:
    full = Path("/dev/full")
    if not full.exists():  # Linux has it, and only there is it a device that is always full
        return
    with full.open("wb", buffering=0) as file, pytest.raises(InputError) as error:
        Journal(file, None).write(record(1))
    assert str(error.value) == (
        "/dev/full cannot be written: No space left on device. Give a folder that can be written with --out."
    )


def test_a_folder_is_asked_for_before_anything_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    require_folder(tmp_path)
    require_folder(tmp_path / "a" / "b")
    for out in (file, file / "a"):
        with pytest.raises(InputError) as error:
            require_folder(out)
        assert str(error.value) == f"--out {out}: {file} is not a folder. Give a folder, or a name that is free."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_written_is_said(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError) as error:
        require_folder(tmp_path / "a")
    assert str(error.value) == f"--out {tmp_path}/a: {tmp_path} may not be written. Give a folder that may."
