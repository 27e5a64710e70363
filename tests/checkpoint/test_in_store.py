"""Checkpoints in an object store: complete or absent whatever request is the last, and two saves of one step never mix."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.checkpoint import (
    CheckpointError,
    DamagedError,
    OwnedBox,
    TensorInfo,
    commit,
    describe,
    join_save,
    latest,
    open_checkpoint,
    save_checkpoint,
    saving,
    verify,
    write_part,
)
from shardwright.checkpoint.folder.directory import committed, leftovers
from shardwright.checkpoint.folder.names import step_directory
from shardwright.checkpoint.writing import data_file
from shardwright.checkpoint.writing import save as writing
from shardwright.core.boxes.box import Box
from shardwright.storage import objects
from shardwright.storage.store import StoreFiles
from shardwright.storage.url import Url
from tests.checkpoint.states import State, point, random_state, same_bits, save
from tests.checkpoint.stores import OUT, RUN, STATE, contents, grow_old, last_request, save_there, whole
from tests.storage.faulty import FaultyFileSystem, Killed, keys


@pytest.fixture(autouse=True)
def _empty() -> Iterator[None]:
    FaultyFileSystem.store.clear()
    yield
    FaultyFileSystem.store.clear()


def test_files_are_in_a_folder_of_the_attempt_and_the_manifest_is_beside() -> None:
    step = save_there(10)
    assert str(step) == "faulty://store/run/checkpoints/step-00000010"
    names = [key.removeprefix("store/run/checkpoints/step-00000010/") for key in keys()]
    assert [re.sub(f"^{RUN}-[0-9a-f]{{8}}", "ATTEMPT", name) for name in names] == [
        "ATTEMPT/boxes-00000-00000.safetensors",
        "ATTEMPT/boxes.index",
        "ATTEMPT/part-00000.index",
        "manifest.json",
    ]
    assert (committed(OUT), leftovers(OUT)) == ((step,), ())


def test_several_files_are_uploaded_at_a_time_and_boxes_are_read_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "LEAST_UPLOAD_BYTES", 1)
    state = random_state(1, tensors=12)
    parallel = StoreFiles.parallel
    begun, opened_before = threading.Barrier(parallel, timeout=20), count()
    reading, most, new_file = list[str](), list[int](), data_file.new_file

    def read(owned: OwnedBox) -> np.ndarray:
        reading.append(owned.name)
        # Another thread that reads has the time to begin.
        threading.Event().wait(0.002)
        most.append(len(reading))
        reading.pop()
        return np.asarray(owned.array)

    def opened(*arguments: Any) -> Any:
        # The first ones have all begun before one of them ends.
        if next(opened_before) < parallel:
            begun.wait()
        return new_file(*arguments)

    monkeypatch.setattr(data_file, "new_file", opened)
    owned = [replace(one, array=partial(read, one)) for one in state.owned]
    found = save_checkpoint(OUT, point(1), state.infos, owned, run=RUN)
    assert isinstance(found, Url)
    assert whole(found, state)
    assert max(most) == 1
    files = [key for key in keys() if key.endswith(".safetensors")]
    assert parallel <= len(files) <= 2 * parallel


@pytest.mark.parametrize("seed", range(4))
def test_any_state_and_any_box(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "REQUEST_BYTES", 5)
    state = random_state(seed)
    assert whole(save_there(1, state), state)
    found, rng = latest(str(OUT)).checkpoint, np.random.default_rng(seed)
    assert found is not None
    for name, array in state.arrays.items():
        start = tuple(int(rng.integers(size)) for size in array.shape)
        stop = tuple(int(rng.integers(low + 1, size + 1)) for low, size in zip(start, array.shape, strict=True))
        box = Box(start, stop)
        assert same_bits(found.read_box(name, box), array[box.slices])


def test_a_checkpoint_moves_between_a_store_and_a_folder(tmp_path: Path) -> None:
    """As ``aws s3 cp --recursive`` copies it: the same files under the same names."""
    step = save_there(10)
    for name, data in contents("/store/run/").items():
        target = tmp_path / "down" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    assert whole(tmp_path / "down" / "checkpoints" / step.name)
    assert verify(tmp_path / "down")["unknown"] == []

    local = save(tmp_path / "up", STATE, step=20)
    for path in local.iterdir():
        objects.put(Url("faulty://store/run/checkpoints/step-00000020") / path.name, path.read_bytes())
    assert whole(step_directory(OUT, 20))
    assert [one["step"] for one in describe(OUT)["checkpoints"]] == [20, 10]
    # And again after other saves, which delete old leftovers.
    grow_old(100)
    save_there(30)
    save_there(40)
    assert whole(step_directory(OUT, 20))
    assert verify(OUT)["ok"]


def test_killed_at_every_request() -> None:
    before, number, killed_in = save_there(10, random_state(1)), 0, set()
    while True:
        with last_request(number) as made, suppress(Killed):
            save_there(20)
            break
        killed_in.add(made[number])
        assert whole(before, random_state(1))
        there = [step.name for step in committed(OUT)]
        left = leftovers(OUT)
        assert there == ["step-00000010"]
        shown = describe(OUT)["under_way"]
        assert all(name.startswith(f"step-00000020/{RUN}-") for name in shown)
        assert len(shown) == len(left) == (1 if any("step-00000020" in key for key in keys()) else 0)
        # Another run may be alive, so that only this one's next save deletes it.
        save_there(30, run="81d2e044")
        assert leftovers(OUT) == left
        save_there(40)
        assert leftovers(OUT) == ()
        assert whole(step_directory(OUT, 40))
        for step in (30, 40):
            objects.remove(
                [
                    OUT / "checkpoints" / f"step-000000{step}" / name
                    for name in contents(f"/store/run/checkpoints/step-000000{step}/")
                ]
            )
        number += 1
    assert killed_in == {"put", "part", "end of parts", "delete", "create"}
    assert whole(step_directory(OUT, 20))


def test_an_old_leftover_of_any_run_is_deleted_and_a_new_one_is_not() -> None:
    with last_request(3), suppress(Killed):
        save_there(20, run=None)
    left = leftovers(OUT)
    assert len(left) == 1
    grow_old(23)
    save_there(30)
    save_there(40)
    assert leftovers(OUT) == left
    grow_old(25)
    # The machine's clock may be a day fast: by the store's, nothing is younger than the leftover.
    save_there(50)
    assert leftovers(OUT) == left
    save_there(60)
    assert leftovers(OUT) == ()
    assert [step.name for step in committed(OUT)] == [f"step-000000{step}" for step in (60, 50, 40, 30)]


def refused(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as raised:
        call()
    return str(raised.value).replace("faulty://store/run/checkpoints/step-000000", "STEP ")


def test_a_request_that_fails_leaves_nothing() -> None:
    save_there(10)
    before, number = keys(), 0
    while len(committed(OUT)) == 1:
        with last_request(number, PermissionError("Access Denied")) as made:
            with suppress(CheckpointError):
                save_there(20)
            if len(made) > number:
                assert keys() == before, made
        number += 1
    assert whole(step_directory(OUT, 20))
    with last_request(0, PermissionError("Access Denied")):
        assert refused(lambda: save_there(30)) == (
            "STEP 30: this checkpoint could not be written: the store refuses these credentials, or they may not do this: reading "
            "needs list and get, saving put and delete too. Without a manifest it is none, and earlier checkpoints are as they were."
        )


def test_of_two_saves_of_one_step_the_second_is_refused() -> None:
    """Both begin before either has a manifest, and both write all their boxes."""
    other = State(arrays={**STATE.arrays, "count": np.array(8, np.int32)}, boxes=STATE.boxes)
    with saving(OUT, 10, run="81d2e044") as second:
        write_part(second, other.infos, other.owned)
        with saving(OUT, 10, run=RUN) as first:
            write_part(first, STATE.infos, STATE.owned)
            commit(first, point())
        # A reader sees the first one alone, while the other is still there.
        assert whole(step_directory(OUT, 10))
        assert describe(OUT)["under_way"] == [f"step-00000010/{second.name}"]
        saved_before = (
            "STEP 10: this step was saved before, and a checkpoint is never overwritten. Move it away, or give this one a "
            "folder of its own (--out of a run)."
        )
        assert refused(lambda: commit(second, point())) == saved_before
    assert whole(step_directory(OUT, 10))
    assert leftovers(OUT) == ()
    assert refused(lambda: save_there(10)) == saved_before


def test_processes_join_by_the_name_of_the_save() -> None:
    array = np.arange(12.0).reshape(4, 3)
    info = TensorInfo(name="w", shape=(4, 3), dtype="float64")
    with saving(str(OUT), 10) as begun:
        for process, low in ((0, 0), (1, 2)):
            save = begun if process == 0 else join_save(str(OUT), 10, begun.name)
            box = Box((low, 0), (low + 2, 3))
            write_part(save, [info], [OwnedBox(name="w", box=box, array=array[box.slices])], process=process)
        step = commit(begun, point(), num_processes=2)
    np.testing.assert_array_equal(open_checkpoint(step).read_box("w"), array)
    for name in ("..", "step-00000010.saving-5f0c9a17", f"{begun.name}/x"):
        with pytest.raises(CheckpointError, match="no save of this step is in progress under the name"):
            join_save(OUT, 10, name)


def lost_answers(monkeypatch: pytest.MonkeyPatch, arrives: bool, again: bool = False) -> None:
    """The answer to the conditional write is lost, ``again``: and the client repeats the request."""
    write = FaultyFileSystem.pipe_file

    def lose(self: FaultyFileSystem, path: str, value: bytes, mode: str = "overwrite") -> None:
        if mode == "overwrite" or arrives:
            write(self, path, value, mode)
        if mode == "create" and again:
            write(self, path, value, mode)
        if mode == "create":
            raise TimeoutError

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", lose)


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_answer_is_asked_for(monkeypatch: pytest.MonkeyPatch, again: bool) -> None:
    lost_answers(monkeypatch, arrives=True, again=again)
    assert whole(save_there(10))
    assert leftovers(OUT) == ()


def test_where_nobody_knows_nothing_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is under way, and arrives after the process has given up."""
    lost_answers(monkeypatch, arrives=False)
    with pytest.raises(CheckpointError) as raised:
        save_there(10)
    assert str(raised.value) == (
        "faulty://store/run/checkpoints/step-00000010: it is not known whether this checkpoint was written: the store cannot be "
        "reached, or has dropped the connection. Nothing of it was deleted. See whether it is there with shardwright ckpt verify "
        "faulty://store/run/checkpoints/step-00000010, and go on with --resume."
    )
    assert len([key for key in keys() if key.endswith("safetensors")]) == 1


@pytest.mark.parametrize("name", ["boxes-00000-00000.safetensors", "part-00000.index", "boxes.index", "manifest.json"])
def test_a_flipped_bit_and_a_missing_object_are_found(name: str) -> None:
    step = save_there(10)
    (path,) = [path for path in FaultyFileSystem.store if path.endswith(name)]
    data = bytearray(FaultyFileSystem.store[path].getvalue())
    data[-3] ^= 4
    objects.put(Url(f"faulty:/{path}"), bytes(data))
    checked = verify(OUT)
    assert not checked["ok"]
    assert str(Url(f"faulty:/{path}")) in checked["checkpoints"][0]["problems"][0]["message"]
    del FaultyFileSystem.store[path]
    if name == "manifest.json":
        assert committed(OUT) == ()
    else:
        with pytest.raises(DamagedError, match="the file is missing"):
            open_checkpoint(step)


def test_what_does_not_belong_is_named() -> None:
    step = save_there(10)
    objects.put(step / "notes.txt", b"")
    objects.put(OUT / "checkpoints" / "step-10" / "notes.txt", b"")
    checked = verify(OUT)
    assert [problem["message"] for problem in checked["checkpoints"][0]["problems"]] == [
        f"{step}/notes.txt: the manifest does not list this file. Move it away."
    ]
    assert checked["unknown"] == ["step-10"]


@pytest.mark.parametrize("call", [committed, leftovers, verify, describe, latest, lambda _: save_there(20)])
def test_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch, call: Callable[[Url], object]) -> None:
    save_there(10)

    def gone(*_: object, **__: object) -> None:
        raise ConnectionError

    for name in ("ls", "info", "find", "cat_ranges"):
        monkeypatch.setattr(FaultyFileSystem, name, gone)
    with pytest.raises(CheckpointError, match="the store cannot be reached, or has dropped the connection"):
        call(OUT)


def test_a_store_that_is_gone_in_the_middle_of_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(save_there(10))

    def gone(*_: object, **__: object) -> None:
        raise ConnectionError

    monkeypatch.setattr(FaultyFileSystem, "cat_ranges", gone)
    with pytest.raises(
        CheckpointError, match=r"tensor 'embed', .*: cannot be read: the store cannot be reached"
    ) as raised:
        checkpoint.read_box("embed")
    assert not isinstance(raised.value, DamagedError)
