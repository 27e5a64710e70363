"""A saved state is read back bit for bit, under any other partition, and also by the safetensors library."""

from __future__ import annotations

import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from shardwright.checkpoint import (
    CheckpointError,
    OwnedBox,
    TensorInfo,
    commit,
    join_save,
    latest,
    open_checkpoint,
    save_checkpoint,
    saving,
    write_part,
)
from shardwright.checkpoint.reading import streams
from shardwright.checkpoint.writing import data_file
from shardwright.core.boxes.box import Box
from tests.checkpoint.states import point, random_array, random_partition, random_state, same_bits, save, small_state


@pytest.mark.parametrize("seed", range(25))
def test_any_partition_is_read_under_any_other(tmp_path: Path, seed: int) -> None:
    state = random_state(seed)
    checkpoint = open_checkpoint(save(tmp_path, state))
    rng = np.random.default_rng(1000 + seed)
    for name, array in state.arrays.items():
        for box in random_partition(rng, Box.whole(array.shape), 5):
            assert same_bits(checkpoint.read_box(name, box), array[box.slices])
        assert same_bits(checkpoint.read_box(name), array)


def test_the_state_of_the_run_is_restored(tmp_path: Path) -> None:
    state = small_state()
    checkpoint = open_checkpoint(save(tmp_path, state))
    assert checkpoint.point == point()
    assert list(checkpoint.point.mesh) == ["data", "fsdp"]
    assert list(checkpoint.tensors.values()) == state.infos


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    state = small_state()
    directory = save(tmp_path, state)
    [path] = directory.glob("*.safetensors")
    with safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"shardwright": "2", "step": "10"}
        assert sorted(file.keys()) == ["count", "embed[0:4,0:4]", "embed[0:4,4:8]", "scale"]
        assert same_bits(file.get_tensor("embed[0:4,4:8]"), state.arrays["embed"][:, 4:])
        assert same_bits(file.get_tensor("count"), state.arrays["count"])
        assert file.get_slice("scale").get_dtype() == "BF16"
        assert file.get_slice("scale").get_shape() == [6]


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 64, 65])
def test_large_boxes_are_written_and_read_by_chunks(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding's boxes have 64 bytes: chunks that divide them, do not, and are larger."""
    monkeypatch.setattr(data_file, "CHUNK_BYTES", num_bytes)
    monkeypatch.setattr(streams, "BLOCK_BYTES", num_bytes)
    state = small_state()
    directory = save(tmp_path, state)
    [path] = directory.glob("*.safetensors")
    theirs = load_file(path)
    for name, boxes in state.boxes.items():
        for box in boxes:
            key = name if len(boxes) == 1 else f"{name}[{box}]"
            assert same_bits(theirs[key], state.arrays[name][box.slices])
    checkpoint = open_checkpoint(directory)
    assert all(same_bits(np.asarray(checkpoint.read_box(name)), array) for name, array in state.arrays.items())


@pytest.mark.parametrize("seed", range(3))
def test_the_safetensors_library_agrees_on_every_dtype_it_gives_numpy(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32"]
    arrays = {name: random_array(rng, (3, 5), np.dtype(name)) for name in [*names, "float64", "complex64"]}
    infos = [TensorInfo(name=name, shape=(3, 5), dtype=name) for name in arrays]
    owned = [OwnedBox(name=name, box=Box.whole((3, 5)), array=array) for name, array in arrays.items()]
    [path] = save_checkpoint(tmp_path, point(), infos, owned).glob("*.safetensors")
    loaded = load_file(path)
    assert all(same_bits(loaded[name], array) for name, array in arrays.items())


def test_every_box_is_aligned_to_its_elements(tmp_path: Path) -> None:
    for seed in range(10):
        checkpoint = open_checkpoint(save(tmp_path, random_state(seed), step=seed))
        for stored in checkpoint.parts.stored(0):
            assert stored.offset % np.dtype(getattr(ml_dtypes, stored.info.dtype, stored.info.dtype)).itemsize == 0


def test_arrays_of_any_memory_order_are_stored_row_major(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    others = {
        "columns": np.asfortranarray(array),
        "strided": np.repeat(array, 2, 1)[:, ::2],
        "big": array.astype(">f4"),
    }
    infos = [TensorInfo(name=name, shape=(4, 6), dtype="float32") for name in others]
    owned = [OwnedBox(name=name, box=Box.whole((4, 6)), array=other) for name, other in others.items()]
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, point(), infos, owned))
    assert all(same_bits(checkpoint.read_box(name), array) for name in others)


def test_a_tensor_without_elements_has_no_boxes(tmp_path: Path) -> None:
    infos = [TensorInfo(name="empty", shape=(0, 4), dtype="float32"), TensorInfo(name="w", shape=(2,), dtype="float32")]
    array = np.ones(2, np.float32)
    owned = [
        OwnedBox(name="empty", box=Box((0, 0), (0, 4)), array=np.empty((0, 4), np.float32)),
        OwnedBox(name="w", box=Box((0,), (2,)), array=array),
        OwnedBox(name="w", box=Box((2,), (2,)), array=array[2:]),  # a device that the dim was too small for
    ]
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, point(), infos, owned))
    assert checkpoint.read_box("empty").shape == (0, 4)
    assert same_bits(checkpoint.read_box("w"), array)
    assert checkpoint.read_box("w", Box((1,), (1,))).shape == (0,)


def test_a_state_without_tensors_is_a_checkpoint(tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path, point(), [], [])
    assert sorted(path.name for path in directory.iterdir()) == ["boxes.index", "manifest.json", "part-00000.index"]
    assert open_checkpoint(directory).tensors == {}


def test_keys_are_unique_where_a_name_looks_like_a_box(tmp_path: Path) -> None:
    arrays = {
        "w": np.arange(4, dtype=np.int32).reshape(2, 2),
        "w[0:2,0:1]": np.arange(9, dtype=np.int32),
        "__metadata__": np.ones(1),
    }
    infos = [TensorInfo(name=name, shape=array.shape, dtype=array.dtype.name) for name, array in arrays.items()]
    boxes = [
        ("w", Box((0, 0), (2, 1))),
        ("w[0:2,0:1]", Box((0,), (9,))),
        ("w", Box((0, 1), (2, 2))),
        ("__metadata__", Box((0,), (1,))),
    ]
    owned = [OwnedBox(name=name, box=box, array=arrays[name][box.slices]) for name, box in boxes]
    directory = save_checkpoint(tmp_path, point(), infos, owned)
    checkpoint = open_checkpoint(directory)
    assert all(same_bits(checkpoint.read_box(name), array) for name, array in arrays.items())
    [path] = directory.glob("*.safetensors")
    assert len(load_file(path)) == 4


def test_arrays_are_made_one_at_a_time(tmp_path: Path) -> None:
    alive: list[str] = []

    def made(number: int) -> np.ndarray:
        alive.append(f"made {number}")
        return np.full(4, number, np.float32)

    infos = [TensorInfo(name=f"w{number}", shape=(4,), dtype="float32") for number in range(3)]
    owned = [
        OwnedBox(name=f"w{number}", box=Box((0,), (4,)), array=lambda number=number: made(number))
        for number in range(3)
    ]
    assert alive == []
    checkpoint = open_checkpoint(save_checkpoint(tmp_path, point(), infos, owned))
    assert alive == ["made 0", "made 1", "made 2"]
    assert checkpoint.read_box("w2").tolist() == [2.0] * 4


def test_raw_elements_are_moved_without_being_interpreted(tmp_path: Path) -> None:
    state = random_state(4)
    first = open_checkpoint(save(tmp_path, state, step=1))
    owned = [
        OwnedBox(name=name, box=Box.whole(info.shape), array=first.read_box(name, raw=True))
        for name, info in first.tensors.items()
    ]
    second = open_checkpoint(save_checkpoint(tmp_path, point(2), list(first.tensors.values()), owned))
    assert second.tensors == first.tensors
    assert all(same_bits(second.read_box(name), array) for name, array in state.arrays.items())


def test_what_is_read_belongs_to_the_reader(tmp_path: Path) -> None:
    state = small_state()
    checkpoint = open_checkpoint(save(tmp_path, state))
    box = Box((0, 0), (2, 8))
    checkpoint.read_box("embed", box)[...] = -1
    assert same_bits(checkpoint.read_box("embed", box), state.arrays["embed"][:2])


def _count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    read: list[str] = []
    original = Path.open

    def counting(self: Path, *args: object, **kwargs: object) -> object:
        if self.suffix == ".safetensors":
            read.append(self.name)
        return original(self, *args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(Path, "open", counting)
    return read


def test_only_boxes_that_are_needed_are_read_and_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(64, dtype=np.float32).reshape(8, 8)
    boxes = [Box((row, 0), (row + 2, 8)) for row in (0, 2, 4, 6)]
    infos = [TensorInfo(name="w", shape=(8, 8), dtype="float32")]
    with saving(tmp_path, 10) as under_way:
        owned = [OwnedBox(name="w", box=box, array=array[box.slices]) for box in boxes]
        write_part(under_way, infos, owned, max_file_bytes=1)  # a file each
        checkpoint = open_checkpoint(commit(under_way, point()))
    read = _count_reads(monkeypatch)
    wanted = [Box((1, device), (4, device + 1)) for device in range(8)]
    for box, found in zip(wanted, checkpoint.read_boxes("w", wanted), strict=True):
        assert same_bits(found, array[box.slices])
    assert read == ["boxes-00000-00000.safetensors", "boxes-00000-00001.safetensors"]


@pytest.mark.parametrize("seed", range(5))
def test_processes_write_parts_and_one_commits(tmp_path: Path, seed: int) -> None:
    state = random_state(seed)
    num_processes = 3
    with saving(tmp_path, 10) as first:
        others = [join_save(tmp_path, 10, first.name) for _ in range(num_processes - 1)]
        # The last process may well be the first to be done, and one that owns nothing says so.
        for process, under_way in reversed(list(enumerate([first, *others]))):
            owned = state.owned[process::num_processes] if process != 1 else []
            if process == 0:
                owned += state.owned[1::num_processes]
            write_part(under_way, state.infos, owned, process=process)
        directory = commit(first, point(), num_processes=num_processes)
    names = sorted(path.name for path in directory.iterdir())
    assert names == [
        *("boxes-00000-00000.safetensors", "boxes-00002-00000.safetensors", "boxes.index", "manifest.json"),
        *("part-00000.index", "part-00001.index", "part-00002.index"),
    ]
    found = latest(tmp_path).checkpoint
    assert found is not None
    assert all(same_bits(found.read_box(name), array) for name, array in state.arrays.items())


def test_data_is_durable_before_the_names_that_refer_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        found = (
            path for path in (tmp_path, *tmp_path.rglob("*")) if os.path.samestat(path.stat(), os.fstat(descriptor))
        )
        log.append(("fsync", next(found).name.split(".saving-")[0]))
        fsync(descriptor)

    def renamed(old: Path, new: Path) -> None:
        log.append(("rename", Path(new).name))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path, small_state())
    assert log == [
        ("fsync", tmp_path.name),
        ("fsync", "boxes-00000-00000.safetensors"),
        ("fsync", "part-00000.index.tmp"),
        ("rename", "part-00000.index"),
        ("fsync", "boxes.index.tmp"),
        ("rename", "boxes.index"),
        ("fsync", "manifest.json.tmp"),
        ("rename", "manifest.json"),
        ("fsync", "step-00000010"),
        ("rename", "step-00000010"),
        ("fsync", "checkpoints"),
    ]


def test_a_dtype_that_numpy_does_not_know_is_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(save(tmp_path, small_state()))
    known = np.dtype

    def without_ml_dtypes(name: object) -> np.dtype:
        if name == "bfloat16":
            raise TypeError(name)
        return known(name)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(np, "dtype", without_ml_dtypes)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read_box("scale")
    assert str(caught.value) == (
        "tensor 'scale' is stored as bfloat16, which NumPy knows only once ml_dtypes is imported. "
        "Import ml_dtypes first, or read it with raw=True."
    )
    assert checkpoint.read_box("scale", raw=True).dtype == known("V2")
    monkeypatch.undo()
    assert checkpoint.read_box("scale").dtype == ml_dtypes.bfloat16
