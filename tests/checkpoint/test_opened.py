"""What is read when a checkpoint is opened, and what only when a box of it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shardwright.checkpoint import (
    CheckpointError,
    DamagedError,
    OwnedBox,
    TensorInfo,
    commit,
    join_save,
    open_checkpoint,
    saving,
    write_part,
)
from shardwright.checkpoint.reading import files
from shardwright.core.boxes.box import Box
from tests.checkpoint.editing import data_file, flip, part_file
from tests.checkpoint.states import point, same_bits

ARRAY = np.arange(32, dtype=np.float32).reshape(4, 8)
COLUMNS = [Box((0, column), (4, column + 2)) for column in (0, 2, 4, 6)]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Four processes, of which each has written two columns."""
    info = TensorInfo(name="w", shape=(4, 8), dtype="float32")
    with saving(tmp_path, 10) as save:
        for process, box in enumerate(COLUMNS):
            owned = [OwnedBox(name="w", box=box, array=ARRAY[box.slices])]
            write_part(join_save(tmp_path, 10, save.name), [info], owned, process=process)
        return commit(save, point(), num_processes=4)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are opened, in order."""
    names: list[str] = []
    original = Path.open

    def counting(self: Path, *args: object, **kwargs: object) -> object:
        names.append(self.name)
        return original(self, *args, **kwargs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    monkeypatch.setattr(Path, "open", counting)
    return names


def test_without_all_files_only_the_manifest_and_the_index_are_read(directory: Path, opened: list[str]) -> None:
    checkpoint = open_checkpoint(directory, all_files=False)
    assert opened == ["manifest.json", "boxes.index"]
    opened.clear()
    assert checkpoint.boxes("w") == tuple(COLUMNS)
    assert opened == []
    assert same_bits(checkpoint.read_box("w", Box((1, 3), (3, 5))), ARRAY[1:3, 3:5])
    assert opened == [part_file(1), data_file(1), part_file(2), data_file(2)]
    opened.clear()
    checkpoint.read_box("w", COLUMNS[1])
    assert opened == [data_file(1)]


def test_all_files_are_opened_once_each(directory: Path, opened: list[str]) -> None:
    open_checkpoint(directory)
    parts = [name for process in range(4) for name in (part_file(process), data_file(process))]
    assert opened == ["manifest.json", "boxes.index", *parts]


@pytest.mark.parametrize("name", [part_file(2), data_file(2)])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damage_of_one_process_is_found_where_its_boxes_are_read(directory: Path, name: str, damage: str) -> None:
    path = directory / name
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, path.stat().st_size - 1)
    checkpoint = open_checkpoint(directory, all_files=False)
    for number in (0, 1, 3):
        assert same_bits(checkpoint.read_box("w", COLUMNS[number]), ARRAY[COLUMNS[number].slices])
    for _ in range(2):
        with pytest.raises(CheckpointError) as caught:
            checkpoint.read_box("w", COLUMNS[2])
        assert str(caught.value).startswith(f"{path}: ")
        # A data file that is not there may be on a disk that is not mounted.
        assert isinstance(caught.value, DamagedError) == ((name, damage) != (data_file(2), "missing"))
    if (name, damage) != (data_file(2), "flipped"):
        with pytest.raises(DamagedError):
            open_checkpoint(directory)


def test_the_parts_that_were_read_last_are_kept(
    directory: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "CACHED_PARTS", 2)
    checkpoint = open_checkpoint(directory, all_files=False)
    opened.clear()
    for number in (0, 1, 0, 2, 0, 1):
        checkpoint.read_box("w", COLUMNS[number])
    assert [name for name in opened if name.startswith("part")] == [part_file(process) for process in (0, 1, 2, 1)]


def test_threads_may_share_a_checkpoint(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CACHED_PARTS", 1)
    checkpoint = open_checkpoint(directory, all_files=False)
    wanted = [COLUMNS[number % 4] for number in range(64)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda box: checkpoint.read_box("w", box), wanted))
    assert all(same_bits(array, ARRAY[box.slices]) for array, box in zip(found, wanted, strict=True))
