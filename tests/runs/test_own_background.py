"""A user's own program that goes on while it is saved: what is saved is the state at the call, and nothing is lost."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, TensorInfo, committed, open_newest, verify
from shardwright.core.boxes.box import Box
from shardwright.runs import background
from shardwright.runs.own_program.background import BackgroundSaves
from shardwright.runs.own_program.held import HeldShard, HeldTensor
from shardwright.runs.own_program.members import Members, alone
from shardwright.runs.own_program.store import VALUES, ProgramState
from tests.conftest import ROOT
from tests.runs.test_own_replicas import in_processes

WAIT_S = 60
"""For what takes milliseconds on a machine that does nothing else."""
write_part = background.write_part


def state(array: np.ndarray, first: int = 0, size: int = 16, name: str = "w") -> ProgramState:
    """A process that holds rows of a vector of ``size``, from ``first``."""
    shard = HeldShard(Box((first,), (first + len(array),)), lambda: array)
    held = HeldTensor(info=TensorInfo(name=name, shape=(size,), dtype="float32"), shards=(shard,))
    return ProgramState(held=(held,), values={"rows": 8}, framework="numpy", name="mine")


def ones() -> np.ndarray:
    return np.ones(16, np.float32)


def test_the_state_at_the_call_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = threading.Event()

    def late(*arguments: Any, **named: Any) -> None:
        assert changed.wait(WAIT_S)
        write_part(*arguments, **named)

    monkeypatch.setattr(background, "write_part", late)
    array = ones()
    with BackgroundSaves(tmp_path, alone(), keep=None) as saves:
        directory = saves.save_state(state(array), 1)
        array[:] = 2
        assert not directory.exists()
        changed.set()
        saves.save_state(state(array), 2)
        assert directory.exists(), "the second save did not wait for the first"
        array[:] = 3
        saves.save_state(state(array), 3)
    assert [open_newest(path).read_box("w")[0] for path in committed(tmp_path)] == [3, 2, 1]
    assert open_newest(tmp_path).point.metadata[VALUES] == {"rows": 8}
    assert verify(tmp_path)["ok"]


def test_another_state_than_before_has_copies_of_its_own(tmp_path: Path) -> None:
    with BackgroundSaves(tmp_path, alone(), keep=2) as saves:
        for step, name in enumerate(("a", "b", "a"), 1):
            saves.save_state(state(ones() * step, name=name), step)
    assert [list(open_newest(path).tensors) for path in committed(tmp_path)] == [["a"], ["b"]]
    assert open_newest(tmp_path).read_box("a")[0] == 3
    assert len(saves._saver._copies._buffers) == 1


def test_what_fails_in_the_background_is_an_error_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left")

    for call in ("check", "wait", "save", "leave"):
        folder = tmp_path / call
        saves = BackgroundSaves(folder, alone(), keep=None)
        monkeypatch.setattr(background, "write_part", full)
        saves.save_state(state(ones()), 1)
        saves._saver.wait_here()
        monkeypatch.undo()
        calls = {
            "check": saves.check,
            "wait": saves.wait,
            "save": lambda saves=saves: saves.save_state(state(ones()), 2),
            "leave": lambda saves=saves: saves.__exit__(None, None, None),
        }
        with pytest.raises(CheckpointError, match="no space left"):
            calls[call]()
        assert not committed(folder)
        assert not list((folder / "checkpoints").glob("step-*"))
        if call != "check":
            # It is said once, and the next save is another one.
            saves.save_state(state(ones()), 3)
            saves.wait()
            assert len(committed(folder)) == 1


def test_an_error_of_the_program_does_not_end_a_save_that_can_be_completed(tmp_path: Path) -> None:
    def program() -> None:
        with BackgroundSaves(tmp_path, alone(), keep=None) as saves:
            saves.save_state(state(ones()), 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert verify(tmp_path)["ok"]


PROGRAM = """
import sys, numpy as np
from shardwright.runs.own_program.background import BackgroundSaves
from shardwright.runs.own_program.members import alone
from tests.runs.test_own_background import state
saves = BackgroundSaves(sys.argv[1], alone(), keep=None)
saves.save_state(state(np.ones(1 << 22, np.float32), size=1 << 22), 1)
"""


def test_a_program_that_ends_without_waiting_loses_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert verify(tmp_path)["ok"]
    dropped = BackgroundSaves(tmp_path, alone(), keep=None)
    dropped.save_state(state(ones()), 2)
    del dropped
    gc.collect()
    assert open_newest(tmp_path).point.step == 2


def test_processes_save_together_and_fail_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(save: Any, *arguments: Any, process: int, **named: Any) -> None:
        if save.step == 2 and process == 1:
            raise CheckpointError("no space left")
        write_part(save, *arguments, process=process, **named)

    monkeypatch.setattr(background, "write_part", full)

    def work(members: Members) -> str:
        half = np.full(8, members.index, np.float32)
        with BackgroundSaves(tmp_path, members, keep=None) as saves:
            saves.save_state(state(half, 8 * members.index), 1)
            half[:] = 7
            saves.save_state(state(half, 8 * members.index), 2)
            try:
                saves.wait()
            except CheckpointError as error:
                return str(error)
        return "saved"

    first, second = in_processes(2, work)
    assert second == "no space left"
    assert "process 1 could not write its part. Its error: no space left" in first
    [only] = committed(tmp_path)
    np.testing.assert_array_equal(open_newest(only).read_box("w"), np.repeat(np.arange(2, dtype=np.float32), 8))
