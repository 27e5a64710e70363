"""Asynchronous saves: steps go on while a state is written, and what is written is the state at the save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import CheckpointError, OwnedBox, TensorInfo, open_checkpoint, verify
from shardwright.checkpoint.writing.copies import Copying, HostCopies
from shardwright.core.boxes.box import Box
from shardwright.runs import RunError, background, run
from shardwright.runs.loop import Loop
from shardwright.runs.run import _run
from shardwright.training.options import RunOptions, Silent
from tests.runs.counting import NOBODY, ROWS, Counting, counting, go, made, options, plan_of, sums
from tests.runs.test_group import each, together

WAIT_S = 60
"""For what takes milliseconds on a machine that does nothing else."""
write_part = background.write_part


def waited_until(true: Callable[[], bool]) -> None:
    """Returns when it is. A thread of processes that are threads has nothing else to wait for."""
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.001)


def steps_saved(out: Path) -> dict[int, int]:
    """The loss that each checkpoint holds, by its step."""
    found: dict[int, int] = {}
    for directory in (out / "checkpoints").glob("step-*"):
        checkpoint = open_checkpoint(directory)
        found[checkpoint.point.step] = int(checkpoint.read_box("sums")[:, 0].sum())
    return found


def expected(run_options: RunOptions, *steps: int) -> dict[int, int]:
    known = sums(run_options, max(steps))
    return {step: known[step - 1] for step in steps}


class Late(Counting):
    """A save copies its state only when a step has begun, and then after the step has changed it, if it does not wait."""

    def __init__(self) -> None:
        super().__init__(range(ROWS), {"counting": "1"})
        self._began, self._changed = threading.Event(), threading.Event()

    def boxes(self) -> Iterator[OwnedBox]:
        self._began.clear()
        self._changed.clear()
        for owned in super().boxes():
            yield replace(owned, array=lambda array=owned.array: self._copied(array))

    def _copied(self, array: Any) -> np.ndarray:
        if self._step < 6:
            assert self._began.wait(WAIT_S), "no step began while the state was copied"
            self._changed.wait(0.02)
        return array

    def step(self, batch: Any, before_update: Any) -> Any:
        self._began.set()
        metrics = super().step(batch, before_update)
        self._changed.set()
        return metrics


def test_a_step_begins_while_the_state_is_copied_and_waits_before_it_changes_it(tmp_path: Path) -> None:
    run_options = options(tmp_path)
    go(Late(), run_options, checkpoint_every=1, async_checkpoints=True)
    assert steps_saved(run_options.out) == expected(run_options, 1, 2, 3, 4, 5, 6)


class Slow(Counting):
    """A disk that begins to write step ``held`` only when the engine has done step ``until``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: int = 2, until: int = 4) -> None:
        super().__init__(range(ROWS), {"counting": "1"})
        self.reached = threading.Event()
        self._until = until

        def late(save: Any, *arguments: Any, **named: Any) -> None:
            if save.step == held:
                assert self.reached.wait(WAIT_S), "no step was done while the state was written"
            write_part(save, *arguments, **named)

        monkeypatch.setattr(background, "write_part", late)

    def step(self, batch: Any, before_update: Any) -> Any:
        metrics = super().step(batch, before_update)
        if self._step == self._until:
            self.reached.set()
        return metrics


def test_steps_go_on_while_a_state_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_options = options(tmp_path)
    ended = go(Slow(monkeypatch, until=3), run_options, checkpoint_every=2, async_checkpoints=True)
    assert ended.checkpoint == run_options.out / "checkpoints" / "step-00000006"
    assert steps_saved(run_options.out) == expected(run_options, 2, 4, 6)
    assert verify(run_options.out)["ok"]


def test_a_save_is_the_same_as_one_that_is_not_asynchronous(tmp_path: Path) -> None:
    files: list[dict[str, bytes]] = []
    for asynchronous in (False, True):
        folder = tmp_path / str(asynchronous)
        folder.mkdir()
        run_options = options(folder)
        go(counting(), run_options, checkpoint_every=2, async_checkpoints=asynchronous)
        found = sorted((run_options.out / "checkpoints").rglob("boxes*"))
        files.append({str(path.relative_to(run_options.out)): path.read_bytes() for path in found})
    assert files[0] == files[1]
    assert len(files[0]) == 6


def test_the_next_save_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_options, shown = options(tmp_path), Silent()
    engine = Slow(monkeypatch, held=2, until=99)
    result = background._Flight.result

    def asked(flight: Any) -> Path:
        # Only the save of step 4 asks for the result of that of step 2, which is not written before.
        engine.reached.set()
        return result(flight)

    monkeypatch.setattr(background._Flight, "result", asked)
    changed = replace(run_options, checkpoint_every=2, async_checkpoints=True)
    run(changed, plan_of(), shown, connection=NOBODY, make_engine=made(engine))
    assert steps_saved(run_options.out) == expected(run_options, 2, 4, 6)
    [said] = [text for text in shown.messages if "waited" in text and "that of step 2:" in text]
    assert said.startswith("the save of step 4 waited ")


def test_what_fails_in_the_background_ends_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_options = options(tmp_path)

    def full(save: Any, *arguments: Any, **named: Any) -> None:
        if save.step == 4:
            raise CheckpointError(f"{save.out}: this checkpoint could not be written: No space left on device.")
        write_part(save, *arguments, **named)

    monkeypatch.setattr(background, "write_part", full)
    with pytest.raises(CheckpointError, match=r"No space left on device\.$"):
        go(counting(), run_options, checkpoint_every=2, async_checkpoints=True)
    assert steps_saved(run_options.out) == expected(run_options, 2)
    monkeypatch.undo()
    ended = go(counting(), run_options, checkpoint_every=2, async_checkpoints=True, resume=True)
    assert ended.loss == sums(run_options, 6)[-1]
    assert sorted(path.name for path in (run_options.out / "checkpoints").glob("step*")) == [
        f"step-0000000{step}" for step in (2, 4, 6)
    ]


def test_a_signal_waits_for_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_options, record = options(tmp_path), Loop._record

    def recorded(self: Loop, step: int, *rest: Any) -> None:
        record(self, step, *rest)
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_record", recorded)
    ended = go(Slow(monkeypatch, held=2, until=3), run_options, checkpoint_every=2, async_checkpoints=True)
    assert (ended.ended, ended.step) == ("interrupted", 3)
    assert steps_saved(run_options.out) == expected(run_options, 2, 3)


def test_a_step_that_was_not_the_model_s_does_not_lose_the_save_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_options, engine = options(tmp_path), Slow(monkeypatch, held=2, until=3)
    engine.overflow_at = 3
    with pytest.raises(RunError):
        go(engine, run_options, checkpoint_every=2, async_checkpoints=True)
    assert steps_saved(run_options.out) == expected(run_options, 2)


def by_two(folder: Path, **changes: Any) -> list[Any]:
    """How a run by two ended, or its error, with a thread for each process."""
    changed = replace(options(folder), **changes)
    engines = [counting(offsets=range(2)), counting(offsets=range(2, ROWS))]
    with together(2) as groups:
        return each(groups, lambda group: _run(changed, plan_of(), Silent(), group, made(engines[group.index])))


def test_process_0_commits_when_all_have_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = threading.Event()
    commit = background.commit

    def slow(save: Any, *arguments: Any, process: int, **named: Any) -> None:
        if process == 1:
            # Long enough for process 0 to commit, if it did not wait.
            assert not committed.wait(0.3)
        write_part(save, *arguments, process=process, **named)

    def seen(*arguments: Any, **named: Any) -> Path:
        committed.set()
        return commit(*arguments, **named)

    monkeypatch.setattr(background, "write_part", slow)
    monkeypatch.setattr(background, "commit", seen)
    ended = by_two(tmp_path, async_checkpoints=True)
    assert [getattr(one, "step", one) for one in ended] == [6, 6]
    run_options = options(tmp_path)
    assert (
        open_checkpoint(run_options.out / "checkpoints" / "step-00000006").read_box("sums")[:, 1].tolist() == [96] * 4
    )
    assert verify(run_options.out)["ok"]


def test_a_file_that_is_renamed_while_process_0_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part file is, once it is complete: process 0 has listed it under its former name."""
    looked = threading.Event()
    scandir = os.scandir

    @contextmanager
    def with_one_that_is_gone(folder: Path) -> Iterator[Iterator[os.DirEntry[str]]]:
        former = folder / "part-00001.index.tmp"
        former.touch()
        # An entry asks for its size when it is looked at: after the file is gone.
        with scandir(folder) as there:
            entries = list(there)
        former.unlink()
        yield iter(entries)
        looked.set()

    def listed(folder: Any) -> Any:
        waits = isinstance(folder, Path) and ".saving-" in folder.name and not looked.is_set()
        return with_one_that_is_gone(folder) if waits else scandir(folder)

    def late(save: Any, *arguments: Any, process: int, **named: Any) -> None:
        if process == 1 and not looked.wait(WAIT_S):
            # An AssertionError would leave process 0 to wait for this one.
            raise CheckpointError("process 0 has not looked for the files of process 1.")
        write_part(save, *arguments, process=process, **named)

    monkeypatch.setattr(os, "scandir", listed)
    monkeypatch.setattr(background, "write_part", late)
    ended = by_two(tmp_path, async_checkpoints=True)
    assert [getattr(one, "step", one) for one in ended] == [6, 6]


def fails(save: Any, *arguments: Any, process: int, **named: Any) -> None:
    if process == 1:
        raise CheckpointError("the disk is full.")
    write_part(save, *arguments, process=process, **named)


def test_all_processes_learn_which_one_could_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "write_part", fails)
    first, second = by_two(tmp_path, async_checkpoints=True)
    assert "process 1 could not write its part. Its error: the disk is full." in str(first)
    assert str(second) == "the disk is full."
    assert not list((options(tmp_path).out / "checkpoints").glob("step*"))


def test_a_process_that_writes_after_process_0_has_failed_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(save: Any, *arguments: Any, process: int, **named: Any) -> None:
        if process == 0:
            raise CheckpointError("the disk of process 0 is full.")
        # Process 0 deletes the folder of the save that it ends.
        waited_until(lambda: not save.directory.exists())
        write_part(save, *arguments, process=process, **named)

    monkeypatch.setattr(background, "write_part", late)
    monkeypatch.setattr(background.Saver, "check", lambda _: None)
    first, second = by_two(tmp_path, async_checkpoints=True)
    assert str(first) == "the disk of process 0 is full."
    assert str(second).endswith("process 0 of 2 could not do it. Its error: the disk of process 0 is full.")


def test_an_error_is_read_complete_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Process 0 looks while another process writes why it failed."""
    looked, sizes_in, opened = threading.Event(), background.sizes_in, Path.open

    def seen(directory: Path) -> dict[str, int]:
        looked.set()
        return sizes_in(directory)

    def slowly(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        file = opened(path, mode, *arguments, **named)
        if path.name.startswith("failed-00001") and "r" not in mode:
            # It exists, and nothing is in it yet. The first look may have begun before; none follows one that was wrong.
            for wait_s in (WAIT_S, 2 * background.LAST_POLL_S):
                looked.clear()
                looked.wait(wait_s)
        return file

    monkeypatch.setattr(background, "write_part", fails)
    monkeypatch.setattr(background, "sizes_in", seen)
    monkeypatch.setattr(Path, "open", slowly)
    first, _ = by_two(tmp_path, async_checkpoints=True)
    assert "Its error: the disk is full." in str(first)


def test_an_error_that_finds_no_room_is_still_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(background, "write_part", fails)
    monkeypatch.setattr(background, "write_durable", full)
    first, second = by_two(tmp_path, async_checkpoints=True)
    assert "Its error: no room to write it. It is in the output of that process." in str(first)
    assert str(second) == "the disk is full."


def test_a_part_that_never_comes_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(save: Any, *arguments: Any, process: int, **named: Any) -> None:
        if process == 0:
            write_part(save, *arguments, process=process, **named)

    monkeypatch.setattr(background, "write_part", nothing)
    monkeypatch.setattr(background, "PATIENCE_S", 0.2)
    first, second = by_two(tmp_path, async_checkpoints=True)
    assert "nothing was written, and the parts of 1 of 2 processes are missing, the first is 1." in str(first)
    assert "process 0 of 2 could not do it" in str(second)


def arrays(copying: Copying) -> list[np.ndarray]:
    return [owned.array() if callable(owned.array) else owned.array for owned in copying.boxes]


@pytest.mark.parametrize("dtype", ["V2", "V4", "V8", "float32", "bool", "int8"])
def test_a_copy_does_not_change_and_its_memory_is_used_again(dtype: str) -> None:
    rng = np.random.default_rng(0)
    live = np.frombuffer(rng.bytes(6 * np.dtype(dtype).itemsize), dtype).reshape(2, 3).copy().T
    copies = HostCopies()
    taken: list[np.ndarray] = []
    for _ in range(2):
        copying = copies.begin([OwnedBox(name="w", box=Box.whole(live.shape), array=lambda: live)])
        array = arrays(copying)[0]
        assert array.tobytes() == live.tobytes()
        assert array.strides == live.strides, "the step does not wait for transposed dims"
        before = array.tobytes()
        live[...] = np.zeros(1, dtype)[0]
        assert array.tobytes() == before
        taken.append(array)
    assert np.shares_memory(taken[0], taken[1])


def test_too_little_host_memory_is_one_error() -> None:
    class Huge:
        def __call__(self) -> np.ndarray:
            return np.broadcast_to(np.zeros(1, np.uint8), (1 << 60,))

    info = TensorInfo(name="w", shape=(1 << 60,), dtype="uint8")
    call: Callable[[], np.ndarray] = Huge()
    with pytest.raises(CheckpointError) as caught:
        arrays(HostCopies().begin([OwnedBox(name=info.name, box=Box.whole(info.shape), array=call)]))
    assert str(caught.value) == (
        "'w', box [0:1152921504606846976]: host memory has no room for a copy of it: Unable to allocate 1.00 EiB for an array with "
        "shape (1152921504606846976,) and data type uint8. Save without a copy: not asynchronously."
    )
