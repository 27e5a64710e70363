"""``metrics.jsonl``: each step once, after any earlier content, and one message for what cannot be written."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import pytest

from shardwright.core.findings.errors import InputError
from shardwright.runs.metrics.journal import Journal, board_writer, journal, keep_later_lines
from shardwright.training.options import StepRecord, require_folder
from tests.checkpoint.states import largest_file


def record(step: int) -> StepRecord:
    return StepRecord(step=step, loss=7.5 - step, grad_norm=1.25, tokens=96, tokens_per_s=960.0, step_s=0.1)


def write(out: Path, first: int, last: int, **options: bool) -> list[str]:
    """The messages of the run."""
    messages: list[str] = []
    with journal(out, first_step=first, writer=None, say=messages.append, **options) as records:
        for step in range(first + 1, last + 1):
            records.write(record(step))
    return messages


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_line_has_the_fields_of_the_contract(tmp_path: Path) -> None:
    write(tmp_path / "new" / "run", 0, 1)
    assert (tmp_path / "new" / "run" / "metrics.jsonl").read_text() == (
        '{"step": 1, "loss": 6.5, "grad_norm": 1.25, "tokens": 96, "tokens_per_s": 960.0, "step_s": 0.1, "dropped": 0}\n'
    )


def test_a_line_is_there_when_it_is_written(tmp_path: Path) -> None:
    with journal(tmp_path, first_step=0, writer=None, say=print) as records:
        records.write(record(1))
        assert steps(tmp_path) == [1]


def test_steps_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, 0, 7)
    write(tmp_path, 4, 6)
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    write(tmp_path, 0, 1)
    assert steps(tmp_path) == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("broken", ['{"step": 5, "lo', '{"step": 5}', "\xff\x00"])
def test_an_incomplete_line_is_dropped_and_reported(broken: str, tmp_path: Path) -> None:
    write(tmp_path, 0, 4)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(broken.encode("latin-1"))
    messages = write(tmp_path, 4, 6)
    assert messages == [
        f"{tmp_path}/metrics.jsonl: the last line is incomplete, as a killed run leaves it; its step is done again"
    ]
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


DAMAGED = {
    "no JSON": b'{"step": 2, "lo\x13s": 5.5\n',
    "no UTF-8": b'{"step": 2, "\xff": 5.5}\n',
    "no mapping": b"[]\n",
    "no step": b'{"stap": 2}\n',
    "no number": b'{"step": "2"}\n',
    "a later step": b'{"step": 20, "loss": 5.5}\n',
    "two lines in one": b'{"step": 2, "loss": 5.5}\x0b{"step": 3, "loss": 4.5}\n',
    "too deep": b"[" * 100_000 + b"\n",
    "nothing": b"\n",
}


@pytest.mark.parametrize("damaged", DAMAGED.values(), ids=DAMAGED)
def test_every_good_line_stays_and_a_damaged_one_is_copied(damaged: bytes, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 8)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = damaged
    path.write_bytes(b"".join(lines))
    messages = write(tmp_path, 6, 7)
    (copy,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert copy.read_bytes() == damaged
    assert messages == [f"{path}: line 2 is damaged; the damaged text is kept in {copy}, and every other line stays"]
    assert steps(tmp_path) == [1, 3, 4, 5, 6, 7]
    assert path.read_bytes().splitlines(keepends=True)[:5] == [lines[0], *lines[2:6]]
    assert write(tmp_path, 7, 8) == []


def test_a_last_line_that_lacks_only_its_newline_is_kept_and_copied_if_its_step_is_not_done_again(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 4)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert write(tmp_path, 4, 4) == []
    assert path.read_bytes() == whole
    path.write_bytes(whole[:-9])
    (messages,) = write(tmp_path, 4, 5)
    (copy,) = tmp_path.glob("metrics.jsonl.damaged-*")
    assert messages == f"{path}: line 4 is damaged; the damaged text is kept in {copy}, and every other line stays"
    assert steps(tmp_path) == [1, 2, 3, 5]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_flipped_no_good_line_is_lost(seed: int, tmp_path: Path) -> None:
    """Flipped bits anywhere, and truncation: each undamaged line of the first steps stays unchanged, in its order."""
    random = Random(seed)
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 30)
    lines, first = path.read_bytes().splitlines(keepends=True), random.randrange(1, 30)
    data = bytearray(b"".join(lines))
    ends = list(accumulate(map(len, lines)))
    touched: set[int] = set()
    for _ in range(random.randrange(1, 4)):
        place = random.randrange(len(data))
        data[place] ^= 1 << random.randrange(8)
        touched |= {sum(end <= place for end in ends), sum(end <= place + 1 for end in ends)}
    path.write_bytes(data)
    messages = write(tmp_path, first, 30)
    after = path.read_bytes().splitlines(keepends=True)
    untouched = [line for place, line in enumerate(lines[:first]) if place not in touched]
    assert [line for line in after if line in untouched] == untouched
    assert bool(messages) == bool(list(tmp_path.glob("metrics.jsonl.damaged-*"))) or "incomplete" in messages[-1]


def test_resume_from_keeps_the_lines_of_later_steps_in_a_copy(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 5)
    later = path.read_bytes().splitlines(keepends=True)[2:]
    messages: list[str] = []
    keep_later_lines(tmp_path, 2, messages.append)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert write(tmp_path, 2, 3) == []
    (copy,) = tmp_path.glob("metrics.jsonl.set-aside-*")
    assert copy.read_bytes() == b"".join(later)
    assert messages == [f"{path}: the lines of the steps after 2 are kept in {copy}"]
    assert steps(tmp_path) == [1, 2, 3]


def test_a_full_disk_is_reported_and_the_lines_are_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, 0, 4)
    broken = b"no record\n" + path.read_bytes()
    path.write_bytes(broken)
    with largest_file(4), pytest.raises(InputError) as error:
        write(tmp_path, 4, 4)
    message = str(error.value)
    assert re.sub("damaged-[0-9a-f]{8}", "damaged-X", message) == (
        f"{path} cannot be written: File too large. Free some space, then go on with --resume, from the newest "
        f"checkpoint. No checkpoint is lost, and no line before this one."
    )
    assert [(left.name, left.read_bytes()) for left in tmp_path.iterdir()] == [("metrics.jsonl", broken)]
    # Truncation needs no free disk space.
    path.write_bytes(broken[len(b"no record\n") :])
    with largest_file(4):
        assert write(tmp_path, 2, 2) == []
    assert steps(tmp_path) == [1, 2]


class Board:
    def __init__(self, logdir: str, *, purge_step: int) -> None:
        self.run_options: list[Any] = [(logdir, purge_step)]

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, walltime: float | None = None) -> None:
        self.run_options.append((tag, scalar_value, global_step, walltime))

    def close(self) -> None:
        self.run_options.append("closed")


def test_a_board_gets_every_metric_with_its_time_and_is_closed(tmp_path: Path) -> None:
    boards: list[Board] = []

    def writer(logdir: str, *, purge_step: int) -> Board:
        boards.append(Board(logdir, purge_step=purge_step))
        return boards[0]

    with journal(tmp_path, first_step=4, writer=writer, say=print) as records:
        records.write(replace(record(5), lr=3e-4, tokens_seen=480, time_s=1.5e9))
    assert boards[0].run_options == [
        (str(tmp_path / "tensorboard"), 5),
        ("loss", 2.5, 5, 1.5e9),
        ("grad_norm", 1.25, 5, 1.5e9),
        ("tokens", 96, 5, 1.5e9),
        ("tokens_per_s", 960.0, 5, 1.5e9),
        ("step_s", 0.1, 5, 1.5e9),
        ("dropped", 0, 5, 1.5e9),
        ("lr", 3e-4, 5, 1.5e9),
        ("tokens_seen", 480, 5, 1.5e9),
        "closed",
    ]


def test_tensorboard_writes_events(tmp_path: Path) -> None:
    with journal(tmp_path, first_step=0, writer=board_writer(), say=print) as records:
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


def test_a_journal_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(InputError) as error, journal(tmp_path, first_step=0, writer=None, say=print):
        pass
    assert str(error.value) == (
        f"{tmp_path}/metrics.jsonl cannot be written: Is a directory. Give a folder that can be written with --out."
    )


def test_a_full_disk_is_reported() -> None:
    full = Path("/dev/full")
    if not full.exists():  # Linux has it, and only there is it a device that is always full
        return
    with full.open("wb", buffering=0) as file, pytest.raises(InputError) as error:
        Journal(file, None).write(record(1))
    assert str(error.value) == (
        "/dev/full cannot be written: No space left on device. Free some space, then go on with --resume, from the newest "
        "checkpoint. No checkpoint is lost, and no line before this one."
    )


def test_a_folder_is_required_before_anything_is_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    require_folder(tmp_path)
    require_folder(tmp_path / "a" / "b")
    for out in (file, file / "a"):
        with pytest.raises(InputError) as error:
            require_folder(out)
        assert str(error.value) == f"--out {out}: {file} is not a folder. Give a folder, or a name that is free."
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_may_not_be_written_is_reported(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError) as error:
        require_folder(tmp_path / "a")
    assert str(error.value) == f"--out {tmp_path}/a: {tmp_path} may not be written. Give a folder that may."
