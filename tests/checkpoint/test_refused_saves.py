"""A save that is invalid or cannot finish ends with one message and leaves no files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from shardwright.checkpoint import (
    CheckpointError,
    OwnedBox,
    TensorInfo,
    commit,
    join_save,
    latest,
    save_checkpoint,
    saving,
    verify,
    write_part,
)
from shardwright.checkpoint.folder.directory import committed, leftovers
from shardwright.core.boxes.box import Box
from shardwright.core.findings.errors import InputError
from tests.checkpoint.states import largest_file, point, same_bits, save, small_state

INFO = TensorInfo(name="w", shape=(4, 8), dtype="float32")
ARRAY = np.zeros((4, 8), np.float32)


def refused(out: Path, call: Callable[[], object]) -> str:
    """The full message of a refused save, the run's directory written as OUT. No file of the save may remain."""
    before = committed(out)
    with pytest.raises(InputError) as caught:
        call()
    assert committed(out) == before
    assert leftovers(out) == ()
    return str(caught.value).replace(str(out), "OUT")


def save_boxes(out: Path, *boxes: Box, info: TensorInfo = INFO, array: np.ndarray | None = None) -> Path:
    owned = [OwnedBox(name="w", box=box, array=ARRAY[box.slices] if array is None else array) for box in boxes]
    return save_checkpoint(out, point(), [info], owned)


STEP = "OUT/checkpoints/step-00000010"
NOT_COVERED = f"{STEP}: tensor 'w' of shape (4, 8) is not covered exactly once by its boxes:"


def test_a_hole(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box((0, 0), (2, 8)), Box((2, 0), (4, 7))))
    assert message == f"{NOT_COVERED} no box covers [2:4,7:8]."


def test_an_overlap(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box((0, 0), (3, 8)), Box((2, 0), (4, 8))))
    assert message == f"{NOT_COVERED} the boxes [0:3,0:8] and [2:4,0:8] both cover [2:3,0:8]."


def test_a_replica_that_writes_too(tmp_path: Path) -> None:
    whole = Box.whole((4, 8))
    message = refused(tmp_path, lambda: save_boxes(tmp_path, whole, whole))
    assert message == f"{NOT_COVERED} the boxes [0:4,0:8] and [0:4,0:8] both cover [0:4,0:8]."


def test_a_long_list_of_faults_is_truncated(tmp_path: Path) -> None:
    message = refused(
        tmp_path,
        lambda: save_boxes(
            tmp_path, *(Box((row, col), (row + 1, col + 1)) for row in range(4) for col in range(row % 2, 8, 2))
        ),
    )
    assert message.startswith(f"{NOT_COVERED} no box covers [")
    assert message.endswith("; and more.")


def test_a_box_outside_the_shape(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box((0, 0), (5, 8))))
    assert message == "tensor 'w': the box [0:5,0:8] is not within its shape (4, 8)."


def test_a_local_shard_that_is_declared_as_the_full_tensor(tmp_path: Path) -> None:
    """An array of one rank's shard, declared with the box of the full tensor."""
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box.whole((4, 8)), array=ARRAY[:2]))
    assert message == (
        "tensor 'w', box [0:4,0:8]: found an array of shape (2, 8) and dtype float32, needed (4, 8) and float32."
    )


def test_an_array_of_another_dtype(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box.whole((4, 8)), array=ARRAY.astype(ml_dtypes.bfloat16)))
    assert message == (
        "tensor 'w', box [0:4,0:8]: found an array of shape (4, 8) and dtype bfloat16, needed (4, 8) and float32."
    )


def test_a_dtype_that_the_format_lacks(tmp_path: Path) -> None:
    info = TensorInfo(name="w", shape=(4, 8), dtype="float8_e4m3")
    message = refused(tmp_path, lambda: save_boxes(tmp_path, Box.whole((4, 8)), info=info))
    assert message == (
        "tensor 'w': a checkpoint does not hold dtype 'float8_e4m3'. Those it holds: bool, uint8, int8, uint16, int16, uint32, "
        "int32, uint64, int64, float8_e4m3fn, float8_e5m2, float8_e8m0fnu, float16, bfloat16, float32, float64, complex64."
    )


def test_a_tensor_that_was_not_declared(tmp_path: Path) -> None:
    owned = [OwnedBox(name="v", box=Box.whole((4, 8)), array=ARRAY)]
    message = refused(tmp_path, lambda: save_checkpoint(tmp_path, point(), [INFO], owned))
    assert message == "a box of 'v' was given, and no such tensor was declared. Known: w."


def test_two_tensors_of_one_name(tmp_path: Path) -> None:
    message = refused(tmp_path, lambda: save_checkpoint(tmp_path, point(), [INFO, INFO], []))
    assert message == "two tensors are called 'w'. Give each a name of its own."


def test_a_step_that_was_saved_before(tmp_path: Path) -> None:
    save(tmp_path, small_state())
    # Refused before anything is copied from a device: `None` is no array.
    owned = [OwnedBox(name="w", box=Box.whole((4, 8)), array=lambda: None)]  # pyright: ignore[reportArgumentType]
    message = refused(tmp_path, lambda: save_checkpoint(tmp_path, point(), [INFO], owned))
    assert message == (
        f"{STEP}: this step was saved before, and a checkpoint is never overwritten. "
        f"Move it away, or give this one a folder of its own (--out of a run)."
    )
    assert verify(tmp_path)["ok"]


def test_a_save_whose_lock_was_deleted_by_hand_is_not_taken_for_a_killed_one(tmp_path: Path) -> None:
    with saving(tmp_path, 20) as first:
        lock = tmp_path / "checkpoints" / ".lock"
        lock.unlink()
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, small_state())
        assert str(caught.value) == (
            f"{first.directory}: another process is saving this checkpoint: its lock, {lock}, was deleted. Wait until it ends, or give "
            f"this one a folder of its own (--out of a run)."
        )
        assert isinstance(first.directory, Path)
        assert first.directory.is_dir()
    save(tmp_path, small_state())
    assert verify(tmp_path)["ok"]


def test_two_savers_in_one_directory(tmp_path: Path) -> None:
    with saving(tmp_path, 20) as first:
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, small_state())
        assert str(caught.value) == (
            f"{tmp_path}/checkpoints: process {os.getpid()} on {os.uname().nodename} is saving a checkpoint here. "
            f"Wait until it ends, or give this one a folder of its own (--out of a run)."
        )
        write_part(first, small_state().infos, small_state().owned)
        commit(first, point(20))
    save(tmp_path, small_state())
    assert len(committed(tmp_path)) == 2


def test_a_save_that_is_left_without_a_commit(tmp_path: Path) -> None:
    with saving(tmp_path, 10) as under_way:
        write_part(under_way, small_state().infos, small_state().owned)
    assert (committed(tmp_path), leftovers(tmp_path)) == ((), ())


def test_a_process_that_has_not_written_its_part(tmp_path: Path) -> None:
    def without_the_second() -> None:
        with saving(tmp_path, 10) as under_way:
            write_part(under_way, small_state().infos, small_state().owned)
            commit(under_way, point(), num_processes=2)

    assert refused(tmp_path, without_the_second) == (
        f"{STEP}: process 1 has not written its part, so this checkpoint is not committed."
    )


@pytest.mark.parametrize(
    ("theirs", "difference"),
    [
        (
            [TensorInfo(name="w", shape=(8, 4), dtype="float32")],
            "'w' is float32 (8, 4) '' there and float32 (4, 8) '' in process 0",
        ),
        ([INFO, TensorInfo(name="v", shape=(), dtype="int32")], "'v' is int32 () '' there and missing in process 0"),
        ([], "'w' is missing there and float32 (4, 8) '' in process 0"),
    ],
)
def test_processes_that_run_different_programs(tmp_path: Path, theirs: list[TensorInfo], difference: str) -> None:
    def disagreeing() -> None:
        with saving(tmp_path, 10) as under_way:
            write_part(under_way, [INFO], [OwnedBox(name="w", box=Box.whole((4, 8)), array=ARRAY)])
            write_part(join_save(tmp_path, 10, under_way.name), theirs, [], process=1)
            commit(under_way, point(), num_processes=2)

    assert refused(tmp_path, disagreeing) == (
        f"{STEP}: process 1 and process 0 do not have the same tensors: {difference}. "
        f"Every process must run the same program with the same options."
    )


def test_processes_with_pieces_of_different_sizes(tmp_path: Path) -> None:
    def disagreeing() -> None:
        with saving(tmp_path, 10) as under_way:
            for process, piece_bytes in enumerate((64, 32, 64)):
                box = Box((process, 0), (process + 1 + (process == 2), 8))
                owned = [OwnedBox(name="w", box=box, array=ARRAY[box.slices])]
                write_part(under_way, [INFO], owned, process=process, piece_bytes=piece_bytes)
            commit(under_way, point(), num_processes=3)

    assert refused(tmp_path, disagreeing) == f"{STEP}: processes have pieces of different sizes: [32, 64] bytes."


def test_one_process_that_takes_the_place_of_another(tmp_path: Path) -> None:
    def twice() -> None:
        with saving(tmp_path, 10) as under_way:
            for _ in range(2):
                write_part(under_way, small_state().infos, small_state().owned)

    assert refused(tmp_path, twice) == (
        f"{STEP}: this checkpoint could not be written: File exists. "
        f"Nothing of it was kept, and earlier checkpoints are as they were."
    )


def test_a_save_that_process_0_has_not_begun(tmp_path: Path) -> None:
    name = "step-00000010.saving-5f0c9a17"
    assert refused(tmp_path, lambda: join_save(tmp_path, 10, name)) == not_in_progress(name)


def not_in_progress(name: str) -> str:
    return (
        f"{STEP}: no save of this step is in progress under the name '{name}'. "
        f"Every process must be given the same --out, on a file system that all of them share."
    )


def test_a_late_process_of_another_run_cannot_join_a_save(tmp_path: Path) -> None:
    """A process that wakes up after its run was killed and started again, while the new run saves the same step."""
    state = small_state()
    with saving(tmp_path, 10) as of_the_dead:
        late = join_save(tmp_path, 10, of_the_dead.name)
    with saving(tmp_path, 10) as under_way:
        with pytest.raises(CheckpointError) as caught:
            join_save(tmp_path, 10, of_the_dead.name)
        assert str(caught.value).replace(str(tmp_path), "OUT") == not_in_progress(of_the_dead.name)
        with pytest.raises(CheckpointError, match="could not be written: No such file or directory"):
            write_part(late, state.infos, [], process=1)
        other = join_save(tmp_path, 10, under_way.name)
        write_part(other, state.infos, state.owned[1:], process=1)
        write_part(under_way, state.infos, state.owned[:1])
        commit(under_way, point(), num_processes=2)
    assert verify(tmp_path)["ok"]


@pytest.mark.parametrize(
    "name", ["step-00000020.saving-5f0c9a17", "step-00000010", "step-00000010.deleting-5f0c9a17", ""]
)
def test_a_name_that_is_not_of_a_save_of_this_step(tmp_path: Path, name: str) -> None:
    if name:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    with pytest.raises(CheckpointError) as caught:
        join_save(tmp_path, 10, name)
    assert str(caught.value).replace(str(tmp_path), "OUT") == not_in_progress(name)


def test_metadata_that_is_not_json_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Out of range float values"):
        save_checkpoint(tmp_path, point(metadata={"loss": float("nan")}), [], [])
    assert (committed(tmp_path), leftovers(tmp_path)) == ((), ())


def test_a_full_disk(tmp_path: Path) -> None:
    save(tmp_path, small_state(), step=5)
    array = np.ones(1 << 20, np.float32)
    info = TensorInfo(name="w", shape=array.shape, dtype="float32")
    owned = [OwnedBox(name="w", box=Box.whole(array.shape), array=array)]
    with largest_file(1 << 20):
        message = refused(tmp_path, lambda: save_checkpoint(tmp_path, point(), [info], owned))
    assert message == (
        f"{STEP}: this checkpoint could not be written: File too large. "
        f"Free some space, then go on with --resume. "
        f"Nothing of it was kept, and earlier checkpoints are as they were."
    )
    assert verify(tmp_path)["ok"]


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    assert refused(tmp_path, lambda: save(tmp_path, small_state())) == (
        f"{STEP}: this checkpoint could not be written: File exists (OUT/checkpoints). "
        f"Nothing of it was kept, and earlier checkpoints are as they were."
    )


# Every call of a save to the file system: (its module, its name).
CALLS = [(os, "fsync"), (os, "rename"), (os, "open"), (Path, "open"), (Path, "mkdir"), (Path, "unlink")]


def failing_at(monkeypatch: pytest.MonkeyPatch, number: int, code: int) -> Callable[[], int]:
    """Makes call ``number`` (from 0) of those fail with an error of the system. The returned function counts the calls made."""
    made = [0]

    def wrapped(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            made[0] += 1
            if made[0] - 1 == number:
                raise OSError(code, os.strerror(code))
            return original(*args, **kwargs)

        return call

    for place, name in CALLS:
        monkeypatch.setattr(place, name, wrapped(getattr(place, name)))
    return lambda: made[0]


def test_whichever_call_of_a_save_fails_a_checkpoint_is_complete_or_absent(tmp_path: Path) -> None:
    state = small_state()
    save(tmp_path, state, step=1)
    outcomes: list[str] = []
    for number in range(200):
        step = number + 2
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = failing_at(monkeypatch, number, errno.ENOSPC)
            try:
                save(tmp_path, state, step=step)
                outcome = "written"
            except CheckpointError as error:
                outcome = str(error).replace(str(tmp_path), "OUT").split(": ", 1)[1]
            unfailed = calls() <= number
        assert leftovers(tmp_path) == ()
        found = latest(tmp_path)
        assert found.passed_over == ()
        assert found.checkpoint is not None
        assert all(same_bits(found.checkpoint.read_box(name), array) for name, array in state.arrays.items())
        assert (found.checkpoint.point.step == step) == ("is written" in outcome or outcome == "written")
        outcomes.append(outcome)
        if unfailed:
            break
    assert len(outcomes) > 12
    could_not = (
        "this checkpoint could not be written: No space left on device. "
        "Free some space, then go on with --resume. "
        "Nothing of it was kept, and earlier checkpoints are as they were."
    )
    without_power = "the checkpoint is written, and might not survive a loss of power: No space left on device."
    # The manifest is read back and validated; the last call of all makes the new name durable.
    assert set(outcomes[:-3]) == {could_not, "cannot be read: No space left on device."}
    assert outcomes[-3:] == [without_power, without_power, "written"]


def test_an_interrupt_in_the_middle_of_a_save(tmp_path: Path) -> None:
    def interrupted() -> np.ndarray:
        raise KeyboardInterrupt

    state = small_state()
    owned = [*state.owned[:-1], OwnedBox(name="count", box=Box((), ()), array=interrupted)]
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, point(), state.infos, owned)
    assert (committed(tmp_path), leftovers(tmp_path)) == ((), ())
    save(tmp_path, state)
